// Runs or mutates the plans of a compiled model, for tests under sanitizers.
//
//   plan_tool run OUT PLAN THREADS STEPS    steps with pseudo-random tokens; prints a hash of all logits
//   plan_tool fuzz OUT PLAN SEED COUNT      loads COUNT damaged and COUNT edited copies of the plan, runs
//                                           those that load
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
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

// 64-byte aligned memory that ends where it is asked to: reading one byte more is seen.
struct Block {
  explicit Block(int64_t size) : data(::operator new(static_cast<size_t>(size), kAlign)) {
    std::memset(data, 0xff, size);  // NaN in every float format
  }
  ~Block() { ::operator delete(data, kAlign); }
  Block(const Block&) = delete;
  static constexpr std::align_val_t kAlign{64};
  void* data;
};

struct Model {
  std::vector<std::unique_ptr<Block>> blocks;
  std::map<std::string, WeightMemory> weights;
};

// Each weight in a block of its own.
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

// Tokens of one step for slots 0 .. B-1, with the same position and number of valid tokens in every row;
// returns `seed` hashed with the valid logits.
uint64_t run_step(Program& program, Team& team, int32_t position, int32_t count, std::mt19937& random, uint64_t seed) {
  const size_t batch = program.batch();
  std::vector<int32_t> ids(batch * program.tokens()), pos(batch, position), valid(batch, count), slot(batch);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % 1000);
  for (size_t b = 0; b < batch; ++b) slot[b] = static_cast<int32_t>(b);
  program.run(team, ids.data(), pos.data(), valid.data(), slot.data());
  const Tensor& logits = program.result("logits");
  const int64_t rows = logits.rank() == 3 ? std::min<int64_t>(count, logits.rows()) : logits.rows();
  return hash(seed, logits.data, rows * logits.pitch);
}

// Steps of growing context up to the capacity, the last one of a chunk with masked tokens.
uint64_t run_steps(Program& program, Team& team, int64_t capacity, int steps) {
  const int tokens = program.tokens();
  std::mt19937 random(5);
  uint64_t result = 0xcbf29ce484222325ull;
  for (int step = 0, pos = 0; step < steps && pos + tokens <= capacity; ++step, pos += tokens) {
    const bool last = step + 1 == steps || pos + 2 * tokens > capacity;
    result = run_step(program, team, pos, last ? tokens - tokens / 3 : tokens, random, result);
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

using Json = nlohmann::json;
using Path = Json::json_pointer;

// Every value in a plan that has no values within, and these by the key they have.
struct Leaves {
  explicit Leaves(const Json& plan) {
    const Json flat = plan.flatten();
    for (const auto& [path, value] : flat.items()) {
      all.emplace_back(path);
      alike[key_of(all.back())].push_back(value);
    }
  }

  static std::string key_of(Path path) {
    while (path.back().find_first_not_of("0123456789") == std::string::npos) path.pop_back();
    return path.back();
  }

  std::vector<Path> all;
  std::map<std::string, std::vector<Json>> alike;
};

Json other_number(int64_t number, std::mt19937& random) {
  const int64_t others[] = {0,  1,  2,  3,  number + 1,          number - 1,          number * 2,          number / 2,         -number,
                            -1, 64, 96, 65, int64_t{1} << 20, int64_t{1} << 31, int64_t{1} << 45, int64_t{1} << 62};
  return others[random() % std::size(others)];
}

// The text with one of its numbers changed: another shape, another name.
std::string other_text(const std::string& text, std::mt19937& random) {
  const size_t from = text.find_first_of("0123456789", random() % (text.size() + 1));
  if (from == std::string::npos) return text + "x";
  const size_t end = std::min(text.find_first_not_of("0123456789", from), text.size());
  const int64_t number = std::strtoll(text.substr(from, std::min<size_t>(end - from, 9)).c_str(), nullptr, 10);
  return text.substr(0, from) + other_number(number, random).dump() + text.substr(end);
}

// The plan with one value changed into a plausible one, which only a check of its meaning can refuse.
std::string edited(const Json& plan, const Leaves& leaves, std::mt19937& random) {
  Json copy = plan;
  const Path& path = leaves.all[random() % leaves.all.size()];
  Json& value = copy[path];
  const std::vector<Json>& alike = leaves.alike.at(Leaves::key_of(path));
  const unsigned choice = random() % 8;
  if (choice == 0) {
    if (path.back().find_first_not_of("0123456789") != std::string::npos) {
      copy[path.parent_pointer()].erase(path.back());
    } else {
      copy[path.parent_pointer()].erase(std::stoul(path.back()));
    }
  } else if (choice < 4) {
    value = alike[random() % alike.size()];
  } else if (value.is_number_integer()) {
    value = other_number(value.get<int64_t>(), random);
  } else if (value.is_string()) {
    value = other_text(value.get<std::string>(), random);
  } else if (value.is_boolean()) {
    value = !value.get<bool>();
  } else {
    value = other_number(1, random);
  }
  return copy.dump();
}

// Reads, binds and runs a plan over memory that holds NaN, at positions up to its capacity. A chunk has
// few valid tokens: the checks are those of a full one, and it takes a hundredth of the time.
bool runs(const Model& model, const std::string& text, std::mt19937& random) {
  constexpr int64_t kMost = 1 << 28;  // an edited plan may ask for any amount of memory
  const Plan plan = parse_plan(text);
  if (plan.arena_bytes > kMost || plan.state_bytes > kMost) return false;
  Block arena(plan.arena_bytes), state(plan.state_bytes);
  Program program(plan, {model.weights, arena.data, plan.arena_bytes, state.data, plan.state_bytes});
  if (program.scratch_bytes() > kMost) return false;
  Team team(1, program.scratch_bytes());
  for (int step = 0; step < 3; ++step) {
    const int64_t count = 1 + random() % std::min(program.tokens(), 9);
    const int64_t most = std::max<int64_t>(0, plan.capacity - count);
    run_step(program, team, static_cast<int32_t>(random() % (most + 1)), static_cast<int32_t>(count), random, 0);
  }
  return true;
}

int fuzz(const Model& model, const std::string& text, unsigned seed, int count) {
  const Json plan = Json::parse(text);
  const Leaves leaves(plan);
  std::mt19937 random(seed);
  for (const bool damage : {true, false}) {
    int loaded = 0, refused = 0;
    for (int i = 0; i < count; ++i) {
      const std::string copy = damage ? damaged(text, random) : edited(plan, leaves, random);
      try {
        loaded += runs(model, copy, random);
      } catch (const PlanError&) {
        ++refused;
      }
    }
    std::printf("%s: %d run, %d refused\n", damage ? "damaged" : "edited", loaded, refused);
  }
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
