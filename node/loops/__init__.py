"""The loops of a node: SAPO rounds, a learner's steps, a rollout worker's batches."""
