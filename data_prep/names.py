"""Folder and file names for tenants, whose own names may hold any character."""

import hashlib
import re
import unicodedata

MAX_SLUG_CHARACTERS = 40


def folder_name(tenant: str) -> str:
    """A slug that a person recognises, and 8 hex digits of the name's SHA-256 that keep it apart from similar names."""
    ascii_name = unicodedata.normalize("NFKD", tenant).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^a-z0-9]+", "-", ascii_name.lower())[:MAX_SLUG_CHARACTERS].strip("-") or "tenant"
    return f"{slug}-{hashlib.sha256(tenant.encode()).hexdigest()[:8]}"
