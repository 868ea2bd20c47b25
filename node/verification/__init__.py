"""What is whose task, and whether an answer to it is right: in a process of its own."""
