"""One HTML page of a run: the tiling over time, where the time went, losses, speeds, decisions, deaths, bytes by link."""

from tatami.report.page.reading import AT_THE_START, GrowingLog, RecordedRun, joined, read_run
from tatami.report.page.run_facts import RunFacts, facts_of
from tatami.report.page.writing import LARGEST_PAGE_BYTES, check_page, page_of, write_page

__all__ = [
    "AT_THE_START",
    "LARGEST_PAGE_BYTES",
    "GrowingLog",
    "RecordedRun",
    "RunFacts",
    "check_page",
    "facts_of",
    "joined",
    "page_of",
    "read_run",
    "write_page",
]
