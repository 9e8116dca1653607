"""The fast transport: buffers shared with the schedulers, and the plan that fills them."""
