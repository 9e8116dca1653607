"""The fast transport: each engine rank copies exactly its own shards out of the trainers' memory."""
