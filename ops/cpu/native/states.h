// Sequences of a step of recurrent layers, read from the step's inputs and checked.
#pragma once

#include <vector>

#include "ops.h"

namespace tokamak::cpu {

// The sequences that have rows or write a slot. Throws std::out_of_range if one names a slot or position that it cannot have.
std::vector<StateRun> runs_of(const States &states);

}  // namespace tokamak::cpu
