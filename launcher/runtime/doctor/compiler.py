"""Check that a C++ compiler is there and that DeepSpeed's operator for CPUs can be built with it."""

import os
import shutil
from collections.abc import Sequence

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report
from plumbline.launcher.runtime.system import startup


def measure(place: Place) -> Facts:
    """Look for the compiler and, where training will need the operator, build and load it."""
    name = os.environ.get("CXX", "c++")
    facts: Facts = {"device": place.world.device.type, "name": name, "compiler": shutil.which(name), "problem": None}
    if place.world.device.type == "cpu":
        try:
            with startup.quiet_stdout():
                os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
                startup.compile_start_up_operator()
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            facts["problem"] = str(error).splitlines()[0]
    return facts


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Find it bad where training would not start, and worth a warning where only torch.compile would miss it."""
    findings = []
    for report in reports:
        facts = report.facts
        if facts["problem"] is not None:
            text = f"rank {report.rank}: DeepSpeed's operator for CPUs cannot be built: {facts['problem']}"
            findings.append(Finding("bad", report.node, text, "install g++, or point CXX at a compiler that works"))
        elif facts["compiler"] is None:
            text = f"rank {report.rank}: C++ compiler {facts['name']!r} not found; train.compile=true needs it"
            findings.append(Finding("warning", report.node, text, "install g++, or point CXX at a compiler"))
    built = "; DeepSpeed's operator for CPUs is built" if reports[0].facts["device"] == "cpu" else ""
    return findings or [Finding("ok", EVERYWHERE, f"C++ compiler {reports[0].facts['compiler']}{built}")]
