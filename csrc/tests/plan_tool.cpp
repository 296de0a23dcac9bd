// Runs or mutates the plans of a compiled model, for tests under sanitizers.
//
//   plan_tool run OUT PLAN THREADS STEPS    steps with pseudo-random tokens; prints a hash of all logits
//   plan_tool fuzz OUT PLAN SEED COUNT      loads COUNT damaged copies of the plan, runs those that load
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "../runtime/program.h"

namespace {

using namespace rewright;

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// 64-byte aligned memory.
struct Block {
  explicit Block(int64_t size) : bytes((size + 63) / 64 * 64), data(std::aligned_alloc(64, bytes ? bytes : 64)) {
    std::memset(data, 0xff, bytes);  // NaN in every float format
  }
  ~Block() { std::free(data); }
  Block(const Block&) = delete;
  int64_t bytes;
  void* data;
};

struct Model {
  std::vector<std::unique_ptr<Block>> blocks;
  std::map<std::string, WeightMemory> weights;
};

// Each weight in a block of its own: reading beyond it is seen.
Model load_weights(const std::filesystem::path& folder) {
  Model model;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string shard = read_file(entry.path());
    uint64_t header_size;
    std::memcpy(&header_size, shard.data(), 8);
    const auto header = nlohmann::json::parse(shard.substr(8, header_size));
    for (const auto& [name, tensor] : header.items()) {
      if (name == "__metadata__") continue;
      const int64_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
      model.blocks.push_back(std::make_unique<Block>(end - begin));
      std::memcpy(model.blocks.back()->data, shard.data() + 8 + header_size + begin, end - begin);
      model.weights[name] = {model.blocks.back()->data, end - begin};
    }
  }
  return model;
}

uint64_t hash(uint64_t seed, const void* data, int64_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (int64_t i = 0; i < size; ++i) seed = (seed ^ bytes[i]) * 0x100000001b3ull;
  return seed;
}

// Steps of growing context over slots 0 .. B-1; all rows valid, ragged at the last step of a chunk.
uint64_t run_steps(Program& program, Team& team, int64_t capacity, int steps) {
  const int batch = program.batch(), tokens = program.tokens();
  std::vector<int32_t> ids(batch * tokens), pos(batch, 0), valid(batch), slot(batch);
  std::mt19937 random(5);
  uint64_t result = 0xcbf29ce484222325ull;
  for (int step = 0; step < steps && pos[0] + tokens <= capacity; ++step) {
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % 1000);
    for (int b = 0; b < batch; ++b) {
      slot[b] = b;
      valid[b] = step + 1 == steps && tokens > 1 ? tokens - tokens / 3 : tokens;
    }
    program.run(team, ids.data(), pos.data(), valid.data(), slot.data());
    const Tensor& logits = program.result("logits");
    const int64_t rows = logits.rank() == 3 ? valid[0] : logits.rows();
    result = hash(result, logits.data, rows * logits.pitch);
    for (int b = 0; b < batch; ++b) pos[b] += valid[b];
  }
  return result;
}

int run(const Model& model, const std::string& text, int threads, int steps) {
  const Plan plan = parse_plan(text);
  Block arena(plan.arena_bytes), state(plan.state_bytes);
  Program program(plan, {model.weights, arena.data, plan.arena_bytes, state.data, plan.state_bytes});
  Team team(threads, program.scratch_bytes());
  std::printf("%016" PRIx64 "\n", run_steps(program, team, plan.capacity, steps));
  return 0;
}

// One to three changes of the kind that a damaged or edited file has.
std::string damaged(const std::string& text, std::mt19937& random) {
  static const char* const kPieces[] = {"0",    "-1",   "4096", "1e30", "null", "true", "\"\"", "[]", "{}", "9223372036854775807",
                                        "bf16", "f32",  "host", "e2m1", "128",  "3"};
  std::string result = text;
  for (int change = random() % 3 + 1; change > 0 && !result.empty(); --change) {
    const size_t at = random() % result.size();
    switch (random() % 5) {
      case 0:
        result[at] = static_cast<char>(random());
        break;
      case 1:
        result.erase(at, random() % 40);
        break;
      case 2:
        result.insert(at, result.substr(random() % result.size(), random() % 60));
        break;
      default: {  // a whole number or word is replaced: most such plans are still JSON
        size_t begin = at, end = at;
        const auto word = [&](size_t i) { return std::isalnum(static_cast<unsigned char>(result[i])) || result[i] == '-'; };
        while (begin > 0 && word(begin - 1)) --begin;
        while (end < result.size() && word(end)) ++end;
        result.replace(begin, end - begin, kPieces[random() % std::size(kPieces)]);
      }
    }
  }
  return result;
}

int fuzz(const Model& model, const std::string& text, unsigned seed, int count) {
  std::mt19937 random(seed);
  int loaded = 0, refused = 0;
  for (int i = 0; i < count; ++i) {
    const std::string copy = damaged(text, random);
    try {
      const Plan plan = parse_plan(copy);
      if (plan.arena_bytes > 1 << 30 || plan.state_bytes > 1 << 30) continue;
      Block arena(plan.arena_bytes), state(plan.state_bytes);
      Program program(plan, {model.weights, arena.data, plan.arena_bytes, state.data, plan.state_bytes});
      if (program.scratch_bytes() > 1 << 30) continue;
      Team team(1, program.scratch_bytes());
      ++loaded;
      run_steps(program, team, plan.capacity, 2);
    } catch (const PlanError&) {
      ++refused;
    }
  }
  std::printf("%d loaded, %d refused\n", loaded, refused);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: plan_tool run|fuzz OUT PLAN THREADS|SEED STEPS|COUNT\n");
    return 2;
  }
  const std::string mode = argv[1];
  const Model model = load_weights(argv[2]);
  const std::string text = read_file(argv[3]);
  if (mode == "run") return run(model, text, std::atoi(argv[4]), std::atoi(argv[5]));
  return fuzz(model, text, std::atoi(argv[4]), std::atoi(argv[5]));
}
