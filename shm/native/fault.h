// What is wrong with memory that another process wrote, or with what was asked of it.
#pragma once

#include <stdexcept>

namespace tokamak {

// Becomes shm.errors.SharedMemoryError in Python.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace tokamak
