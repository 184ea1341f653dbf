"""The tasks there are. A new one is a file like those named here and a line below."""

from data.tasks.addition import AdditionConfig
from data.tasks.induction import InductionConfig
from data.tasks.maze import MazeConfig
from data.tasks.memorization import MemorizationConfig
from data.tasks.reachability import ReachabilityConfig
from data.tasks.retrieval import RetrievalConfig
from data.tasks.star_graph import StarGraphConfig
from data.tasks.sudoku import SudokuConfig

AnyTaskConfig = (
    RetrievalConfig
    | InductionConfig
    | AdditionConfig
    | MemorizationConfig
    | StarGraphConfig
    | SudokuConfig
    | MazeConfig
    | ReachabilityConfig
)
