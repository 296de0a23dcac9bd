class PlanError(ValueError):
    """A plan, or a request to run one, that cannot be executed."""

def cpu_features() -> list[str]:
    """Vector instruction sets that this processor offers and the host kernels can use."""

def vector_name() -> str:
    """The instruction set that the host kernels use."""

def kernels() -> dict[str, str]:
    """Signature of every host kernel by symbol."""

def check_plan(plan: str) -> None:
    """Read a plan; `PlanError` says what is wrong with it."""

def sample(logits: int, count: int, temperature: float, top_p: float, seed: int, draw: int) -> int:
    """A token id from f32[count] logits at an address."""

class Team:
    """Threads that execute steps, the caller's being the first."""

    def __init__(self, threads: int, scratch_bytes: int) -> None: ...
    @property
    def size(self) -> int: ...

class Program:
    """A plan bound to memory: weights, arena and state are given as (address, bytes)."""

    def __init__(
        self, plan: str, weights: dict[str, tuple[int, int]], arena: tuple[int, int], state: tuple[int, int]
    ) -> None: ...
    @property
    def batch(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    def run(self, team: Team, ids: int, pos: int, n_valid: int, slot: int) -> None:
        """One step; addresses of i32[B,T] ids and of i32[B] each."""

    def result(self, name: str) -> tuple[int, int]:
        """Address and bytes of a result of the last step."""

class DeviceError(RuntimeError):
    """The driver is missing, or a card refused something."""

def device_kernels() -> dict[str, str]:
    """Signature of every sm80 kernel by symbol."""

class Device:
    """A card, or this CPU in the place of one."""

    @property
    def multiprocessors(self) -> int: ...

def open_cuda(ordinal: int, paths: list[str]) -> Device:
    """The card with the kernels in the .fatbin files at `paths`; `DeviceError` says why it cannot be used."""

def open_emulation(multiprocessors: int) -> Device:
    """This CPU running the kernels' sources; memory of the card is the CPU's."""

class DeviceProgram:
    """A plan bound to a card's memory: weights, arena and state are given as (address, bytes), `inputs` as
    the address of i32 ids [B,T], then pos, n_valid and slot [B] each."""

    def __init__(
        self,
        plan: str,
        weights: dict[str, tuple[int, int]],
        arena: tuple[int, int],
        state: tuple[int, int],
        inputs: int,
        device: Device,
    ) -> None: ...
    @property
    def launches(self) -> int:
        """Launches of the plan."""

    @property
    def kernels(self) -> list[str]:
        """Names of the card's kernels that `run` launches, in order."""

    def run(self, stream: int, begin: int = 0, end: int | None = None) -> None:
        """Launch the plan's launches [begin, end) on a stream; nothing is waited for."""

    def run_overlapped(self, stream: int) -> None:
        """Launch the whole plan behind what is on a stream; nothing is waited for.

        A launch that can wait by itself begins while the one before it runs and fetches its weights, and
        short launches run beside the chain of the others (csrc/device/schedule.h). The results are those
        of `run`.
        """

    @property
    def early(self) -> int:
        """Launches that begin before the one before them has ended."""

    @property
    def aside(self) -> int:
        """Launches that run beside the chain of the others."""

    def result(self, name: str) -> tuple[int, int]:
        """Address and bytes of a result of the last step."""

MOST_STOPS: int
"""Stop tokens that a row of a `DeviceSampler` can have."""
NOTHING_YET: int
"""What the ring holds before a token is drawn; it has to be put there before each use of a place."""
NONE_FINITE: int
"""What the ring holds in place of a token where no logit was finite."""
NAN_FIRST: int
"""`NAN_FIRST` - i in place of a token where the logit of token i was NaN."""

class DeviceSampler:
    """The choice of the next tokens, behind the launches of a decode step.

    It draws a token for each row with n_valid 1, writes it to ids, adds 1 to pos, and puts it into the next
    place of the row's column in the ring. A row that drew a stop token or its last one gets n_valid 0.

    Args:
        logits: address and bytes of f32[batch, V] (rows may be [1, V]).
        rows: address of `batch` rows of bytes, as `sample_row` makes them.
        weights: address of u64[batch, V], working memory.
        inputs: address of i32 ids, pos and n_valid [batch] each, the step's inputs.
        ring: address of i32[ring_length, ring_rows] in memory that the host reads.
    """

    def __init__(
        self,
        device: Device,
        logits: tuple[int, int],
        batch: int,
        rows: int,
        weights: int,
        inputs: int,
        ring: int,
        ring_length: int,
        ring_rows: int,
    ) -> None: ...
    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that `run` launches."""

    def run(self, stream: int) -> None:
        """Launch it on a stream; nothing is waited for."""

def sample_row(temperature: float, top_p: float, seed: int, draw: int, left: int, stop: list[int]) -> bytes:
    """A row of a `DeviceSampler` that is about to make draw `draw` of its request, and may make `left`."""
