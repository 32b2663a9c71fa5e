"""What stops a run because of something the user can put right (no communication).

`train.py` and the scripts print a `UsageError` as one message and exit with status 2, a `TrainingError` as one message
with status 1; everything else that is raised exits with status 1 and keeps its traceback.
"""


class UsageError(ValueError):
    """A setting, a file or a folder that the user gave cannot be used.

    The message says what is wrong, where (the option's name), what was got, what was expected and how to fix it.
    """


class ConfigError(UsageError):
    """An option is unknown, has the wrong type, or does not fit together with another one."""


class NothingFits(ConfigError):
    """No layout of the model fits the GPUs; a dry run ends with status 3 then."""


class DataFileError(UsageError):
    """A data or tokenizer file is missing, damaged, foreign, or of another version."""


class TrainingError(Exception):
    """A run under way cannot go on, for a reason that lies in its numbers; the message says which and what to try."""
