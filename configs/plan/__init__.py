"""Large models, to be planned on devices that nobody here has, and not to be trained."""
