"""The pieces of the main job: a real model, its prompts, the reference and the check."""
