"""Which tasks to take, how many rollouts of each, how long, and when to admit them."""
