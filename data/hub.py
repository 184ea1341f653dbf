"""Find out in seconds whether the Hugging Face hub answers: its libraries retry for minutes if it does not."""

import os
import urllib.error
import urllib.request
from functools import cache

SECONDS = 5.0
"""Time-out of the request to the hub."""


@cache
def is_reachable() -> bool:
    """Return whether the hub, or HF_ENDPOINT, answers at all; the request is made once per process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:  # certificates are for the libraries to judge
        return "certificate" in str(error.reason).lower()
    except (OSError, ValueError):
        return False
    return True
