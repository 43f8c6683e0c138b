// The maps of the compatible handles, where the host can read a plan's records.
#pragma once
#include "runtime/plan.h"

namespace hep {

// Where they go; M receive rows, Er experts of this rank. The last two may be null: not wanted.
struct PlanMaps {
  int32_t* sparse_to_dense = nullptr;      // [rail rows][L] receive row in each rank of this node, -1 = not sent
  unsigned char* rail_to_node = nullptr;   // [rail rows] needed by this node
  unsigned char* node_to_rail = nullptr;   // [T][N - 1] needed by each other node, ascending
  unsigned char* local_routing = nullptr;  // [M][Er]
  int32_t* permuted_rows = nullptr;        // [M][Er] permuted row, -1 = none
  int32_t* source_ends = nullptr;          // [R] receive row behind the last of each source
};

uint64_t num_rail_rows(const Plan& plan);  // tokens of all ranks of this rail

// Of a complete plan whose counts came by notification.
void write_maps(const Plan& plan, const PlanMaps& maps);

}  // namespace hep
