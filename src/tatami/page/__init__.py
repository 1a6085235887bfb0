"""One HTML page of a run: the tiling over time, where the time went, losses, speeds, decisions, deaths, bytes by link."""

from tatami.page.reading import RecordedRun, read_run
from tatami.page.writing import LARGEST_PAGE_BYTES, check_page, page_of, write_page

__all__ = ["LARGEST_PAGE_BYTES", "RecordedRun", "check_page", "page_of", "read_run", "write_page"]
