"""From a running teacher to a cache, in the order of ``engine.py``.

A place that cannot become a cache is refused. Of the first samples, ``compare.py`` judges the graph by the reference;
``forms`` describe the parts of a record, for the manifest, and compare a sample alone with itself in company. Then,
shard by shard, batches run, become records, and are committed; the last shard seals the cache. ``ray_engine.py``
deals the shards to other processes.
"""
