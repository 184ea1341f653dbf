"""Check that compilers exist, and on a CPU that DeepSpeed's operator can be built."""

import os
from collections.abc import Sequence

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report
from plumbline.launcher.runtime.ranks.deepspeed_start import compile_start_up_operator
from plumbline.launcher.runtime.ranks.process_group import quiet_stdout
from plumbline.launcher.runtime.system.compilers import missing_c_compiler, missing_header


def measure(place: Place) -> Facts:
    """Look for a compiler and, if training will need DeepSpeed's operator, build and load it."""
    device = place.world.device.type
    facts: Facts = {"device": device, "missing": None, "problem": None}
    if device == "cuda":
        facts["missing"] = missing_c_compiler() or missing_header()
    else:
        try:
            with quiet_stdout():
                os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
                compile_start_up_operator()
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            facts["problem"] = str(error).splitlines()[0]
    return facts


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Report as bad if training would not start, and warn if it would only start without compilation."""
    findings = []
    for report in reports:
        facts = report.facts
        if facts["problem"] is not None:
            text = f"rank {report.rank}: DeepSpeed's operator for CPUs cannot be built: {facts['problem']}"
            findings.append(Finding("bad", report.node, text, "install g++, or point CXX at a compiler that works"))
        elif facts["missing"] is not None:
            text = f"rank {report.rank}: blocks are compiled on a GPU, and {facts['missing']}"
            findings.append(Finding("warning", report.node, text, "or train with train.compile=false"))
    built = "; DeepSpeed's operator for CPUs is built" if reports[0].facts["device"] == "cpu" else ""
    return findings or [Finding("ok", EVERYWHERE, f"what torch.compile needs is there{built}")]
