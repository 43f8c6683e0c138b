// Whole worlds in one process: every rank is an OS thread with an engine of its own over private segments.
#pragma once
#include <string>

#include "world_case.h"

namespace hep::test {

// How a world ended. The first rank that failed tells; the others are interrupted.
struct Outcome {
  enum Kind { kRight, kWrong, kDeadline, kProtocol, kError } kind = kRight;
  std::string what;
};

// Runs all operations on all ranks and compares every result, counter and untouched byte with the reference.
Outcome run_world(const WorldCase& world);

// As a check: fails with the case's description.
void check_world(const WorldCase& world);

}  // namespace hep::test
