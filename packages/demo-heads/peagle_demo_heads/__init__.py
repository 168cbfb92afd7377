"""Heads for the demo target of peagle, a folder each. peagle finds them here without an import."""
