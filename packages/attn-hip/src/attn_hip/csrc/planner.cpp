#include "planner.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>

namespace attn {
namespace {

// Items per worker when nothing else bounds the chunk: the last round, where workers run dry, is then short. Fewer
// where short chunks are balanced one by one.
int64_t items_per_worker(const PlanInput& in) { return in.fine ? 6 : 8; }
// Chunks of these parts of a worker's share are tried. More tiles than that are not worth the trying.
constexpr double kShares[] = {1.0,  1.05, 1.1, 1.15, 1.2, 1.35,    1.5,  0.8, 0.7,
                            0.65, 0.6,  0.55, 0.5, 0.45, 0.4, 1.0 / 3, 0.25, 0.2};
constexpr size_t kMostTried = 512;
// Chunks of so many more steps than the shortest are tried besides, where few tiles differ.
constexpr int64_t kSteps = 8;
constexpr size_t kFewSizes = 8;
constexpr int kMostEven = 4;  // parts of the longest tile that are tried too
// Where no pace was measured: what an item costs before its first key, and a second launch that joins partials, in keys
// of an item. Where chunks are as short as they may be, only balance counts.
constexpr int64_t kStart = 96, kJoin = 160;
// Fewer items than this per worker: give an item fewer heads instead.
constexpr int64_t kEnoughPerWorker = 4;
constexpr int64_t kWhole = std::numeric_limits<int32_t>::max();  // a chunk that no request exceeds
constexpr int64_t kMostItems = 1 << 26;  // slots and image words stay far inside 32 bits
constexpr int kBuckets = 256;
constexpr int64_t kLongRows = 256;  // packed rows of a request from which the tallest tile is not half empty

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Keys [begin, end) that some row of a tile sees.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

struct Tiles {
  explicit Tiles(const PlanInput& in) : in_(in) {}

  int64_t count(int request) const { return ceil_div(packed(request), in_.tile_q); }

  int64_t rows(int request, int64_t tile) const {
    return std::min<int64_t>(in_.tile_q, packed(request) - tile * in_.tile_q);
  }

  Span visible(int request, int64_t tile) const {
    const int64_t kv = in_.kv_len[request], first = tile * in_.tile_q;
    const int64_t diagonal = kv - (in_.qo_indptr[request + 1] - in_.qo_indptr[request]);  // of row 0
    Span span = {0, kv};
    if (in_.causal) span.end = std::min(kv, diagonal + (first + rows(request, tile) - 1) / in_.group + 1);
    if (in_.window_left >= 0) span.begin = std::max<int64_t>(0, diagonal + first / in_.group - in_.window_left);
    return span.end > span.begin ? span : Span{0, 0};
  }

  template <class Visit>
  void each(Visit visit) const {
    for (int r = 0; r < in_.batch; r++)
      for (int64_t t = 0, n = count(r); t < n; t++) visit(r, t, visible(r, t));
  }

 private:
  int64_t packed(int request) const {
    return int64_t(in_.qo_indptr[request + 1] - in_.qo_indptr[request]) * in_.group;
  }
  const PlanInput& in_;
};

// Chunks of a grid of step c that a span touches; an empty one is taken as one chunk.
int64_t chunks(const Span& span, int64_t c) { return span.size() ? (span.end - 1) / c - span.begin / c + 1 : 1; }

struct Cut {
  int64_t chunk;
  int32_t heads;  // per item
};

class Cutter {
 public:
  explicit Cutter(const PlanInput& in) : in_(in), tiles_(in) {
    tiles_.each([&](int, int64_t, const Span& span) { tokens_ += span.size(); });
  }

  Cut choose() const {
    Cut cut = {0, std::min(in_.max_heads, in_.num_kv_heads)};
    cut.chunk = chunk(cut.heads);
    while (cut.heads > 1 && items(cut) < kEnoughPerWorker * in_.workers) {
      cut.heads = (cut.heads + 1) / 2;
      cut.chunk = chunk(cut.heads);
    }
    if (in_.split == kSplitAuto && in_.max_slots >= 0)
      while (cut.chunk < kWhole && slots(cut.chunk) > in_.max_slots) cut.chunk = longer(cut.chunk);
    return cut;
  }

  int64_t items(const Cut& cut) const {
    int64_t n = 0;
    tiles_.each([&](int, int64_t, const Span& span) { n += chunks(span, cut.chunk); });
    return n * groups(cut.heads);
  }

 private:
  int64_t groups(int heads) const { return ceil_div(in_.num_kv_heads, heads); }

  int64_t chunk(int heads) const {
    if (in_.split == kSplitNever) return kWhole;
    if (in_.split != kSplitAuto) return std::min(in_.split, kWhole);
    const int64_t even = ceil_div(tokens_ * groups(heads), items_per_worker(in_) * in_.workers);
    const int64_t c = rounded(std::max<int64_t>(even, in_.min_chunk));
    return in_.fine ? balanced(c, groups(heads)) : c;
  }

  // The chunk after which the device is done soonest, by replaying what the sorted items would do.
  int64_t balanced(int64_t otherwise, int64_t groups) const {
    const std::vector<Run> tiles = sizes(groups);
    if (tiles.empty()) return otherwise;
    const double share = double(tokens_ * groups) / in_.workers;
    const bool measured = in_.pace.saturated > 0;
    const Pace pace = measured                        ? in_.pace
                      : otherwise > 3 * in_.min_chunk ? Pace{kStart, 0, kJoin, 0, in_.workers, 0, in_.workers}
                                                      : Pace{0, 0, 0, 0, in_.workers, 0, in_.workers};
    int64_t best = measured ? kWhole : otherwise, least = duration(tiles, best, pace);
    const auto attempt = [&](int64_t c) {
      if (c == best) return;
      const int64_t time = duration(tiles, c, pace);
      if (time < least) best = c, least = time;
    };
    for (const double part : kShares)
      attempt(std::max<int64_t>(ceil_div(int64_t(share * part), in_.fine) * in_.fine, in_.min_chunk));
    if (measured && tiles.size() <= kFewSizes)
      for (int64_t c = otherwise; c < std::min(tiles.front().size, otherwise + kSteps * in_.kv_tile); c += in_.kv_tile)
        attempt(c);
    if (measured)
      for (int parts = 2; parts <= kMostEven; parts++)
        attempt(std::max<int64_t>(rounded(ceil_div(tiles.front().size, parts)), otherwise));
    return best;
  }

  // Equal tiles or items.
  struct Run {
    int64_t size, count;
    bool operator<(const Run& other) const { return size > other.size; }  // the longest first
  };
  // Sizes of all tiles, the longest first; none where there are too many to try anything.
  std::vector<Run> sizes(int64_t groups) const {
    std::vector<int64_t> all;
    tiles_.each([&](int, int64_t, const Span& span) { all.push_back(span.size()); });
    std::vector<Run> runs;
    if (all.size() > kMostTried) return runs;
    std::sort(all.begin(), all.end(), std::greater<>());
    for (const int64_t size : all) add(runs, size, groups);
    return runs;
  }
  static void add(std::vector<Run>& runs, int64_t size, int64_t count) {
    if (!runs.empty() && runs.back().size == size) runs.back().count += count;
    else runs.push_back({size, count});
  }

  // Time until all is done when items go, longest first, to whoever is free: in keys of a worker among few, times
  // Pace::saturated. While more than that many work, all of them get slower alike, so who takes which item is the same.
  int64_t duration(const std::vector<Run>& tiles, int64_t c, const Pace& pace) const {
    int64_t whole = 0;
    std::vector<Run> rest;
    for (const Run& tile : tiles) {
      const bool split = tile.size > c;
      if (split) whole += tile.size / c * tile.count;
      const int64_t left = split ? tile.size % c : tile.size;
      if (left) add(rest, steps(left) + pace.start + (split ? pace.part : 0), tile.count);
    }
    std::sort(rest.begin(), rest.end());
    struct Workers {
      int64_t busy, count;
      bool operator<(const Workers& other) const { return busy > other.busy; }  // the least busy on top
    };
    std::priority_queue<Workers> workers;
    const int64_t rounds = whole / in_.workers, more = whole % in_.workers, each = c + pace.start + pace.part;
    if (in_.workers > more) workers.push({rounds * each, in_.workers - more});
    if (more) workers.push({(rounds + 1) * each, more});
    for (const Run& run : rest)
      for (int64_t left = run.count; left > 0;) {
        const Workers free = workers.top();
        workers.pop();
        const int64_t taken = std::min(free.count, left);
        if (free.count > taken) workers.push({free.busy, free.count - taken});
        workers.push({free.busy + run.size, taken});
        left -= taken;
      }
    const int64_t parts = ceil_div(tiles.front().size, c);
    int64_t time = parts > 1 ? (pace.join + pace.gather * parts) * pace.saturated : 0, past = 0, items = whole;
    for (const Run& run : rest) items += run.count;
    // Few blocks that are left over of many may share compute units.
    const int64_t needed = items <= pace.spread ? pace.saturated : pace.crowded;
    for (int64_t working = std::min<int64_t>(items, in_.workers); !workers.empty(); workers.pop()) {
      if (workers.top().busy == 0) continue;  // has no item
      time += (workers.top().busy - past) * std::max(needed, working);
      past = workers.top().busy, working -= workers.top().count;
    }
    return time;
  }
  // A measured device takes whole steps.
  int64_t steps(int64_t keys) const { return in_.pace.saturated ? rounded(keys) : keys; }

  int64_t rounded(int64_t c) const { return std::min(ceil_div(c, in_.kv_tile) * in_.kv_tile, kWhole); }
  int64_t longer(int64_t c) const { return rounded(c + c / 2 + 1); }

  int64_t slots(int64_t c) const {
    int64_t n = 0;
    tiles_.each([&](int, int64_t, const Span& span) {
      const int64_t parts = chunks(span, c);
      if (parts > 1) n += parts;
    });
    return n * in_.num_kv_heads;
  }

  const PlanInput& in_;
  Tiles tiles_;
  int64_t tokens_ = 0;
};

// Emits items and merges request after request, then puts the expensive items first.
class Emitter {
 public:
  Emitter(const PlanInput& in, Cut cut, Plan& plan) : in_(in), cut_(cut), tiles_(in), plan_(plan) {
    plan_.unsorted.clear();
    plan_.costs.clear();
    plan_.merges.clear();
    plan_.num_launched = 0;
  }

  void run() {
    tiles_.each([&](int r, int64_t t, const Span& span) {
      for (int head = 0; head < in_.num_kv_heads; head += cut_.heads) tile(r, t, head, span);
    });
    plan_.max_heads = cut_.heads;
    plan_.num_slots = int32_t(slots_);
    plan_.chunk = cut_.chunk == kWhole ? kSplitNever : cut_.chunk;
    sort();
  }

 private:
  void tile(int request, int64_t t, int head, const Span& span) {
    const int32_t heads = std::min(cut_.heads, in_.num_kv_heads - head);
    const int64_t parts = chunks(span, cut_.chunk), first = span.begin / cut_.chunk;
    // A row costs its arithmetic, a key of the tile its way through the caches, worth a few rows. A GPU's tile takes
    // as long for few rows as for many.
    const int64_t weight = (in_.pace.saturated ? 1 : tiles_.rows(request, t) + 4) * heads;
    for (int64_t i = 0; i < parts; i++) {
      const int64_t begin = (first + i) * cut_.chunk, end = std::min(begin + cut_.chunk, span.end);
      const int64_t slot = parts > 1 ? slots_ + i * heads : -1;
      const int64_t keys = end - std::max(begin, span.begin);
      // Field by field: a copy of a whole item right after its fields would wait for each of them.
      WorkItem& item = plan_.unsorted.emplace_back();
      item.request = request, item.q_tile = int32_t(t);
      item.kv_head = head, item.num_heads = heads;
      item.kv_begin = int32_t(begin), item.kv_end = int32_t(end);
      item.slot = int32_t(slot), item.merge = parts > 1 ? int32_t(plan_.merges.size()) : -1;
      plan_.costs.push_back((keys + in_.kv_tile) * weight);
    }
    if (parts == 1) return;
    const int32_t launched = parts > in_.joined;
    for (int32_t n = 0; n < heads; n++)
      plan_.merges.push_back({request, int32_t(t), head + n, int32_t(slots_ + n), int32_t(parts), heads, 0, launched});
    plan_.num_launched += launched * heads;
    slots_ += parts * heads;
  }

  // A counting sort by cost, stable: neighbours in memory stay neighbours in time.
  void sort() {
    const std::vector<WorkItem>& from = plan_.unsorted;
    std::vector<int64_t>& costs = plan_.costs;
    plan_.items.resize(from.size());
    if (from.empty()) return;
    const int64_t most = *std::max_element(costs.begin(), costs.end());
    const double scale = double(kBuckets) / double(most + 1);
    size_t starts[kBuckets + 1] = {};
    for (int64_t& cost : costs) {
      cost = std::min<int64_t>(int64_t(double(most - cost) * scale), kBuckets - 1);  // from here on its bucket
      starts[cost + 1]++;
    }
    for (int b = 0; b < kBuckets; b++) starts[b + 1] += starts[b];
    for (size_t i = 0; i < from.size(); i++) plan_.items[starts[costs[i]]++] = from[i];
  }

  const PlanInput& in_;
  Cut cut_;
  Tiles tiles_;
  Plan& plan_;
  int64_t slots_ = 0;
};

}  // namespace

void make_plan(const PlanInput& in, Plan& plan) {
  const Cutter cutter(in);
  const Cut cut = cutter.choose();
  if (cutter.items(cut) * in.num_kv_heads > kMostItems)
    throw std::length_error("plan: needs fewer rows and keys, got more work items than an int32 numbers [fa2.native]");
  Emitter(in, cut, plan).run();
}

Capacity capacity_of(const PlanInput& in, const PlanLimits& limits) {
  const int64_t heads = in.num_kv_heads, packed = limits.total_q * in.group;
  // Of requests with unlike rows each ends with at most one tile that is not full.
  const int64_t per_request = limits.q_len < 0 ? 0 : ceil_div(limits.q_len * in.group, in.tile_q);
  const int64_t tiles = limits.q_len < 0 ? packed / in.tile_q + limits.batch : limits.batch * per_request;
  const int64_t least = in.split == kSplitAuto ? in.min_chunk : in.split;
  if (in.split == kSplitNever || limits.max_kv <= least) return {tiles * heads, 0, 0};
  const bool windowed = in.window_left >= 0;
  // Chunks of the shortest length, over all tiles: a span of n keys touches at most n / c + 1 chunks, or one more
  // when it does not start on the grid.
  int64_t parts = tiles * ceil_div(limits.max_kv, least);
  if (limits.q_len >= 0)
    parts = std::min(parts, per_request * (limits.total_kv / least + limits.batch * (windowed ? 2 : 1)));
  Capacity most = {parts * heads, 0, parts * heads};
  if (in.split == kSplitAuto) {
    // The chunk is at least 1 / (items_per_worker * workers) of the tokens. Without a window a tile that is cut has
    // more than one chunk of keys, so rounding up at most doubles.
    const int64_t even = items_per_worker(in) * in.workers, rest = tiles * heads * (windowed ? 2 : 1);
    const int64_t each = std::min(in.max_heads, in.num_kv_heads);  // slots of one item
    most.items = std::min(most.items, even + rest);
    most.slots = std::min(most.slots, windowed ? even * each + rest : even * 2 * each);
    if (in.max_slots >= 0) most.slots = std::min(most.slots, in.max_slots);
  }
  most.merges = std::min(tiles * heads, most.slots / 2);
  return most;
}

int cta_tile_q(int64_t total_q, int64_t batch, int64_t q_len, int group, bool captured) {
  int64_t rows = 0;  // packed
  if (q_len >= 0) rows = q_len * group;
  else if (captured) rows = (total_q - batch + 1) * group;
  else if (batch > 0) rows = total_q * group / batch;
  return rows <= 16 ? 16 : rows < kLongRows ? 64 : 128;
}

}  // namespace attn
