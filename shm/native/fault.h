// Errors: invalid memory written by another process, or invalid arguments.
#pragma once

#include <stdexcept>

namespace tokamak {

// Becomes shm.errors.SharedMemoryError in Python.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace tokamak
