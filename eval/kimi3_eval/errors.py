"""The one exception that the command line turns into a sentence and exit code 2."""


class Refusal(ValueError):
    """Input that cannot be run. The message is one sentence: what is wrong, with its value, and what to do."""
