"""Shared fixtures: tiny random targets, made from transformers configurations on the spot."""
