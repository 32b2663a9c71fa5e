"""The training program: state, step, loop, metrics, start-up."""
