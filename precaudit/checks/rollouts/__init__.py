"""What a rollout engine's log-probabilities are worth: mismatch with a trainer's and FP64's, and answers."""
