"""Entries to deploy."""

from typing import Any

from peagle.catalog import CatalogHead, Entry


def entry(**other: Any) -> Entry:
    heads = {"p-eagle": CatalogHead(k=5, hub="owner/head")}
    return Entry(**{"target": "owner/model", "heads": heads, **other})
