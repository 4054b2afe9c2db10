"""The demo: the whole path on handwritten digits, with a table and pictures."""
