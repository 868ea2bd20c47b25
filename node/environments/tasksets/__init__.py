"""Other people's tasks: tasksets of Prime Intellect's `verifiers`, posed and scored as our own."""
