"""The tasks there are. A new one is a file like those named here and a line below."""

from data.tasks.addition import AdditionConfig
from data.tasks.induction import InductionConfig
from data.tasks.memorization import MemorizationConfig
from data.tasks.retrieval import RetrievalConfig

AnyTaskConfig = RetrievalConfig | InductionConfig | AdditionConfig | MemorizationConfig
