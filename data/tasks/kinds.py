"""List the tasks. A new one needs a file like those imported here, and a line below."""

from plumbline.data.tasks.addition import AdditionConfig
from plumbline.data.tasks.file import FileConfig
from plumbline.data.tasks.induction import InductionConfig
from plumbline.data.tasks.maze import MazeConfig
from plumbline.data.tasks.memorization import MemorizationConfig
from plumbline.data.tasks.prosqa import ProsqaConfig
from plumbline.data.tasks.reachability import ReachabilityConfig
from plumbline.data.tasks.retrieval import RetrievalConfig
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.data.tasks.sudoku import SudokuConfig

AnyTaskConfig = (
    RetrievalConfig
    | InductionConfig
    | AdditionConfig
    | MemorizationConfig
    | StarGraphConfig
    | SudokuConfig
    | MazeConfig
    | ReachabilityConfig
    | ProsqaConfig
    | FileConfig
)
