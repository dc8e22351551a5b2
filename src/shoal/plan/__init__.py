"""What a run needs before anything is rented: memory, time, traffic and cost, from shapes and constants."""
