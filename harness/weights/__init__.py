"""From trainer to engine: names, buckets, transports, checks."""
