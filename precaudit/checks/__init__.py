"""What is checked beside a run: rollouts, gradients and kernels, programs as text, devices."""
