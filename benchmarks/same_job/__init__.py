"""The same training job with several libraries, to compare their lines of code."""
