import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def no_log_among_the_answers():
    """The command sets logging up where its process begins, which tests that call it in theirs pass over."""
    with capture_logs():
        yield
