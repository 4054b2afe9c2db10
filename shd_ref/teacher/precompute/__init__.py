"""From a running teacher to a cache, in this order; ``engine.py`` tells it.

A folder that holds another job is refused. Of the first samples, ``compare.py`` holds the graph against the
reference. ``forms`` describe what a record holds, for the manifest, and show that a sample alone is what it is in
company. Then each batch runs once for all students, becomes records, and full shards are committed; the last one
seals the cache. ``ray_engine.py`` deals the shards to other processes.
"""
