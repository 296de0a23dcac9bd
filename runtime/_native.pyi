class PlanError(ValueError):
    """A plan, or a request to run one, that cannot be executed."""

class DeviceError(RuntimeError):
    """A card, its driver or its kernels cannot be used."""

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

def device_kernels() -> dict[str, str]:
    """Signature of every sm80 kernel by symbol."""

class Device:
    """A card, or this CPU in the place of one."""

    @property
    def multiprocessors(self) -> int: ...

def open_cuda(ordinal: int, paths: list[str]) -> Device:
    """The card with the kernels in the .fatbin files at `paths`; `DeviceError` says why it cannot be used."""

def open_emulation(multiprocessors: int) -> Device:
    """This CPU running the kernels' sources."""

class DeviceProgram:
    """A plan bound to a card's memory: weights, arena and state are given as (address, bytes)."""

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
    def launches(self) -> int: ...
    def run(self, stream: int, begin: int = 0, end: int | None = None) -> None:
        """Launch the plan's launches [begin, end) on a stream; nothing is waited for."""

    def result(self, name: str) -> tuple[int, int]:
        """Address and bytes of a result of the last step."""
