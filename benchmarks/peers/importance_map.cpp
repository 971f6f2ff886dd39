// The importance matrix as ik_llama.cpp's quantizer takes it; its interface in C has no other way to make one.
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

using Map = std::unordered_map<std::string, std::vector<float>>;

extern "C" Map* make() { return new Map; }
extern "C" void put(Map* map, const char* name, const float* values, int64_t count) { (*map)[name].assign(values, values + count); }
