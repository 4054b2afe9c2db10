"""From a running teacher to a cache: manifest, comparison with the reference, records, shards, several students."""
