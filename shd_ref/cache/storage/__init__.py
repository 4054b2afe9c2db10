"""Folders and object stores, file names, checksums, canonical documents. Imports no other room of the cache."""
