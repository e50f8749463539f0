"""CUDA driver API errors by name and number (CUresult of the CUDA Driver API)."""

NUMBERS = {
    "INVALID_VALUE": 1,
    "OUT_OF_MEMORY": 2,
    "DEVICE_UNAVAILABLE": 46,
    "NO_DEVICE": 100,
    "INVALID_DEVICE": 101,
    "INVALID_CONTEXT": 201,
    "ILLEGAL_ADDRESS": 700,
    "LAUNCH_FAILED": 719,
    "NOT_PERMITTED": 800,
    "MPS_CONNECTION_FAILED": 805,
    "MPS_RPC_FAILURE": 806,
    "MPS_SERVER_NOT_READY": 807,
    "MPS_MAX_CLIENTS_REACHED": 808,
    "MPS_MAX_CONNECTIONS_REACHED": 809,
    "MPS_CLIENT_TERMINATED": 810,
}

TEXTS = {
    "OUT_OF_MEMORY": "out of memory",
    "DEVICE_UNAVAILABLE": "all CUDA-capable devices are busy or unavailable",
    "NO_DEVICE": "no CUDA-capable device is detected",
    "MPS_CLIENT_TERMINATED": "the MPS client was terminated",
}


class CudaError(Exception):
    """A CUDA call failed. `name` as in the CUDA headers, `code` its number."""

    def __init__(self, short_name: str) -> None:
        self.name = f"CUDA_ERROR_{short_name}"
        self.code = NUMBERS[short_name]
        super().__init__(f"{self.name} ({self.code}): {TEXTS.get(short_name, short_name.lower().replace('_', ' '))}")


def from_code(code: int) -> CudaError:
    """The error with this number; an unknown one counts as MPS_RPC_FAILURE."""
    return CudaError(next((name for name, number in NUMBERS.items() if number == code), "MPS_RPC_FAILURE"))
