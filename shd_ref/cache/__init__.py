"""The supervision cache (specs/cache-format.md)."""
