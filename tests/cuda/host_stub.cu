// A host function that calls a device function through a template: nvcc says nothing and makes exit(1) of the call.
// scripts/cubin_check.py --planted must find it.
namespace hep {

template <class A>
struct PlantedRole {
  __device__ __forceinline__ static unsigned columns(unsigned x) { return x + 1; }
};

template <class A>
unsigned planted_plan(unsigned x) {
  return PlantedRole<A>::columns(x);
}

}  // namespace hep

extern "C" __attribute__((visibility("default"))) unsigned hep_planted(unsigned x) {
  return hep::planted_plan<int>(x);
}
