#include "text.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

namespace unspool {

namespace {

uint64_t load(const uint8_t* p) {
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

// Hashes one to seven bytes; every byte affects the result.
uint64_t load_few(const uint8_t* p, size_t size) {
    if (size < 4) return p[0] | static_cast<uint64_t>(p[size / 2]) << 8 | static_cast<uint64_t>(p[size - 1]) << 16;
    uint32_t a, b;
    memcpy(&a, p, 4), memcpy(&b, p + size - 4, 4);
    return a | static_cast<uint64_t>(b) << 32;
}

// A file could be made so that hashes collide, so tables get a new seed in every process. No result depends on the
// seed.
uint64_t fresh_seed() {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
}

uint64_t mixed(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t K1 = 0x9E3779B97F4A7C15u, K2 = 0xD6E8FEB86659FD93u;

constexpr uint64_t GROUP = 32;  // entries that are prefetched together

size_t table_size(uint64_t count) { return static_cast<size_t>(count + count / 2 + 16); }

// The number of bytes of the character at `p`, or 0 if it is not valid: strict UTF-8, no surrogates, no overlong forms.
int character_size(const uint8_t* p, const uint8_t* end) {
    const uint8_t c = *p;
    if (c < 0x80) return 1;
    const int size = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    if (c < 0xC2 || c > 0xF4 || end - p < size) return 0;
    for (int i = 1; i < size; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((c == 0xE0 && p[1] < 0xA0) || (c == 0xED && p[1] > 0x9F) || (c == 0xF0 && p[1] < 0x90) ||
        (c == 0xF4 && p[1] > 0x8F))
        return 0;
    return size;
}

bool is_text(const uint8_t* p, uint64_t size) {
    const uint8_t* end = p + size;
    constexpr uint64_t TOP = 0x8080808080808080u;
    while (p < end) {
        const auto left = static_cast<size_t>(end - p);
        if (((left < 8 ? load_few(p, left) : load(p)) & TOP) == 0) {
            if (left <= 8) return true;
            p += 8;
            continue;
        }
        const int step = character_size(p, end);
        if (step == 0) return false;
        p += step;
    }
    return true;
}

// Merges neighbours until none can be merged. `join(left, right, pair)` says whether two can be, and sets the priority
// and the id. A pair in the heap is stale if either of its pieces has been merged into another since.
template <class Join> void merge(Scratch& scratch, Join join) {
    auto& [pieces, heap, text] = scratch;
    heap.clear();
    const auto offer = [&](int32_t left) {
        if (left < 0 || pieces[left].after < 0) return;
        const int32_t right = pieces[left].after;
        Pair pair{0, left, right, -1, pieces[right].end};
        if (!join(pieces[left], pieces[right], pair)) return;
        heap.push_back(pair);
    };
    for (size_t i = 0; i + 1 < pieces.size(); i++) offer(static_cast<int32_t>(i));
    std::make_heap(heap.begin(), heap.end());
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end());
        const Pair pair = heap.back();
        heap.pop_back();
        Piece &left = pieces[pair.left], &right = pieces[pair.right];
        if (left.begin == left.end || left.after != pair.right || right.end != pair.end) continue;
        left.id = pair.id;
        left.end = right.end;
        left.after = right.after;
        if (right.after >= 0) pieces[right.after].before = pair.left;
        right.end = right.begin;
        for (const int32_t from : {left.before, pair.left}) {
            const size_t before = heap.size();
            offer(from);
            if (heap.size() > before) std::push_heap(heap.begin(), heap.end());
        }
    }
}

void add_piece(std::vector<Piece>& pieces, int32_t id, uint32_t begin, uint32_t end) {
    const auto place = static_cast<int32_t>(pieces.size());
    if (place > 0) pieces.back().after = place;
    pieces.push_back({id, begin, end, place - 1, -1});
}

// A text's characters as pieces. `find` returns a character's token, or -1.
template <class Find> void add_characters(std::string_view text, std::vector<Piece>& pieces, Find find) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
    for (size_t i = 0; i < text.size();) {
        const int step = character_size(bytes + i, bytes + text.size());
        if (step == 0) throw std::invalid_argument("the text is not UTF-8");
        const auto id = static_cast<int32_t>(find(text.substr(i, static_cast<size_t>(step))));
        add_piece(pieces, id, static_cast<uint32_t>(i), static_cast<uint32_t>(i) + static_cast<uint32_t>(step));
        i += static_cast<size_t>(step);
    }
}

// A piece's token; without one, those of its bytes; if bytes have none, neighbours become one `unknown`.
void add_ids(const Piece& piece, std::string_view text, const std::vector<int32_t>& bytes, int32_t unknown,
             std::vector<int32_t>& out) {
    if (piece.id >= 0) out.push_back(piece.id);
    else if (bytes.empty()) {
        if (out.empty() || out.back() != unknown) out.push_back(unknown);
    } else
        for (uint32_t i = piece.begin; i < piece.end; i++) out.push_back(bytes[static_cast<uint8_t>(text[i])]);
}

}  // namespace

// --- Strings ---------------------------------------------------------------------------------------------------------

Strings::Strings(const uint8_t* bytes, uint64_t size, uint64_t position, uint64_t count) : position_(position) {
    starts_.push_back(0);
    if (position > size || count > (size - position) / 8) return;
    starts_.reserve(count + 1);
    uint64_t at = position, total = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (size - at < 8) break;
        const uint64_t length = load(bytes + at);
        if (length > size - at - 8 || length > UINT32_MAX - total) break;
        at += 8 + length, total += length;
        starts_.push_back(static_cast<uint32_t>(total));
    }
    // From here on only the lengths that were just read and checked are used, because the file may change.
    text_.resize(total);
    for (uint64_t i = 0; i + 1 < starts_.size(); i++) {
        uint8_t* copy = text_.data() + starts_[i];
        const size_t length = starts_[i + 1] - starts_[i];
        if (length == 0) continue;
        memcpy(copy, bytes + position + 8 * (i + 1) + starts_[i], length);
        if (!is_text(copy, length)) {
            starts_.resize(i + 1);
            break;
        }
    }
}

uint64_t Strings::hash(std::string_view text) const {
    const auto* p = reinterpret_cast<const uint8_t*>(text.data());
    size_t left = text.size();
    uint64_t h = seed_ ^ mixed(left + 1, K2);
    for (; left >= 8; p += 8, left -= 8) h = mixed(h ^ load(p), K1);
    if (left) h = mixed(h ^ load_few(p, left), K1);
    return mixed(h, K2);
}

void Strings::index() {
    if (!table_.empty()) return;
    seed_ = fresh_seed();
    table_.resize(table_size(size()));
    place_mask_ = static_cast<uint32_t>(std::bit_ceil(size() + 1) - 1);
    uint64_t hashes[GROUP];
    std::string_view texts[GROUP];
    for (uint64_t first = 0; first < size(); first += GROUP) {
        const uint64_t count = std::min<uint64_t>(GROUP, size() - first);
        for (uint64_t i = 0; i < count; i++) {
            texts[i] = at(first + i);
            prefetch_slot(hashes[i] = hash(texts[i]));
        }
        for (uint64_t i = 0; i < count; i++) {
            if (texts[i].empty()) continue;
            const uint32_t tag = tag_of(hashes[i]);
            size_t slot = slot_in(table_, hashes[i]);
            for (; table_[slot]; slot = slot_after(table_, slot))
                if ((table_[slot] & ~place_mask_) == tag && at((table_[slot] & place_mask_) - 1) == texts[i]) break;
            if (table_[slot] == 0) table_[slot] = tag | static_cast<uint32_t>(first + i + 1);
            else if (twice_ < 0) twice_ = static_cast<int64_t>(first + i);
        }
    }
}

void Strings::prefetch_text(uint64_t hash) const {
    const uint32_t place = table_[slot_in(table_, hash)] & place_mask_;
    if (place) __builtin_prefetch(text_.data() + starts_[place - 1]);
}

int64_t Strings::find(std::string_view text, uint64_t hash) const {
    const uint32_t tag = tag_of(hash);
    for (size_t slot = slot_in(table_, hash); table_[slot]; slot = slot_after(table_, slot)) {
        const uint32_t place = (table_[slot] & place_mask_) - 1;
        if ((table_[slot] & ~place_mask_) == tag && at(place) == text) return place;
    }
    return -1;
}

// --- Byte pairs ------------------------------------------------------------------------------------------------------

BytePairs::BytePairs(const Strings& tokens, const Strings& merges, bool whole_words, std::vector<int32_t> bytes)
    : tokens_(tokens), whole_words_(whole_words), bytes_(std::move(bytes)) {
    // GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other bytes are the characters from U+0100
    // on.
    int next = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        const int character = printable ? byte : next++;
        uint8_t* out = spelled_[byte];
        if (character < 0x80) {
            out[0] = static_cast<uint8_t>(character), spelled_size_[byte] = 1;
        } else {
            out[0] = static_cast<uint8_t>(0xC0 | character >> 6);
            out[1] = static_cast<uint8_t>(0x80 | (character & 63));
            spelled_size_[byte] = 2;
        }
        const int64_t id = tokens_.find({reinterpret_cast<const char*>(out), spelled_size_[byte]});
        byte_ids_[byte] = static_cast<int32_t>(id);
        if (id < 0) missing_.push_back(byte);
    }
    seed_ = fresh_seed();
    table_.assign(table_size(merges.size()), {UINT64_MAX, 0, 0});
    for (uint64_t first = 0; first < merges.size() && fault_ < 0; first += GROUP)
        add_group(merges, first, std::min<uint64_t>(GROUP, merges.size() - first));
}

void BytePairs::add_group(const Strings& merges, uint64_t first, uint64_t count) {
    struct Half {
        std::string_view text;
        uint64_t hash;
    } halves[GROUP][2];
    uint64_t pairs[GROUP];
    for (uint64_t i = 0; i < count; i++) {
        const std::string_view text = merges.at(first + i);
        const size_t space = std::min(text.find(' '), text.size());
        halves[i][0].text = text.substr(0, space);
        halves[i][1].text = text.substr(std::min(space + 1, text.size()));  // without a space: empty, and not found
        for (Half& half : halves[i]) tokens_.prefetch_slot(half.hash = tokens_.hash(half.text));
    }
    for (uint64_t i = 0; i < count; i++)
        for (const Half& half : halves[i]) tokens_.prefetch_text(half.hash);
    for (uint64_t i = 0; i < count; i++) {
        const auto [a, b] = halves[i];
        const int64_t left = tokens_.find(a.text, a.hash), right = tokens_.find(b.text, b.hash);
        if (left < 0 || right < 0) {
            fault_ = static_cast<int64_t>(first + i);
            return;
        }
        pairs[i] = static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
        __builtin_prefetch(&table_[slot_in(table_, mixed(pairs[i] ^ seed_, K1))]);
    }
    std::string joined;
    for (uint64_t i = 0; i < count; i++) {
        joined.assign(halves[i][0].text).append(halves[i][1].text);
        // Most tokens are in the order of the merges that produce them.
        const bool follows = last_ + 1 < static_cast<int64_t>(tokens_.size()) && tokens_.at(last_ + 1) == joined;
        last_ = follows ? last_ + 1 : tokens_.find(joined);
        if (last_ < 0) {
            fault_ = static_cast<int64_t>(first + i);
            return;
        }
        table_[slot_of(pairs[i])] = {pairs[i], static_cast<uint32_t>(first + i), static_cast<uint32_t>(last_)};
    }
}

size_t BytePairs::slot_of(uint64_t pair) const {
    size_t slot = slot_in(table_, mixed(pair ^ seed_, K1));
    while (table_[slot].pair != UINT64_MAX && table_[slot].pair != pair) slot = slot_after(table_, slot);
    return slot;
}

void BytePairs::add_bytes(std::string_view word, std::vector<Piece>& pieces) const {
    for (uint32_t i = 0; i < word.size(); i++) {
        const int32_t id = byte_ids_[static_cast<uint8_t>(word[i])];
        if (id < 0) throw std::invalid_argument("a byte has no token");
        add_piece(pieces, id, i, i + 1);
    }
}

void BytePairs::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
    if (word.size() > INT32_MAX) throw std::length_error("a word of more than 2^31 bytes");
    if (whole_words_) {
        scratch.text.clear();
        for (const char c : word) {
            const auto byte = static_cast<uint8_t>(c);
            scratch.text.append(reinterpret_cast<const char*>(spelled_[byte]), spelled_size_[byte]);
        }
        const int64_t id = tokens_.find(scratch.text);
        if (id >= 0) return out.push_back(static_cast<int32_t>(id));
    }
    auto& pieces = scratch.pieces;
    pieces.clear();
    if (bytes_.empty()) add_bytes(word, pieces);
    else add_characters(word, pieces, [&](std::string_view text) { return tokens_.find(text); });
    merge(scratch, [&](const Piece& left, const Piece& right, Pair& pair) {
        if (left.id < 0 || right.id < 0) return false;
        const uint64_t key = static_cast<uint64_t>(left.id) << 32 | static_cast<uint32_t>(right.id);
        const Merge& found = table_[slot_of(key)];
        if (found.pair != key) return false;
        pair.priority = found.rank;
        pair.id = static_cast<int32_t>(found.id);
        return true;
    });
    for (const Piece& piece : pieces)
        if (piece.begin != piece.end) add_ids(piece, word, bytes_, -1, out);
}

// --- Scored pieces ---------------------------------------------------------------------------------------------------

ScoredPieces::ScoredPieces(const Strings& tokens, const uint8_t* scores, std::vector<bool> plain,
                           std::vector<int32_t> bytes, int32_t unknown)
    : tokens_(tokens), scores_(tokens.size()), plain_(std::move(plain)), bytes_(std::move(bytes)), unknown_(unknown) {
    if (!scores_.empty()) memcpy(scores_.data(), scores, 4 * scores_.size());
    for (float& score : scores_)
        if (std::isnan(score)) score = -INFINITY;  // a heap needs an order
}

int64_t ScoredPieces::find(std::string_view text) const {
    const int64_t id = tokens_.find(text);
    return id >= 0 && plain_[static_cast<size_t>(id)] ? id : -1;
}

void ScoredPieces::encode(std::string_view text, Scratch& scratch, std::vector<int32_t>& out) const {
    if (text.size() > INT32_MAX) throw std::length_error("a text of more than 2^31 bytes");
    auto& pieces = scratch.pieces;
    pieces.clear();
    add_characters(text, pieces, [&](std::string_view each) { return find(each); });
    merge(scratch, [&](const Piece& left, const Piece& right, Pair& pair) {
        const int64_t id = find(text.substr(left.begin, right.end - left.begin));
        if (id < 0) return false;
        pair.priority = -static_cast<double>(scores_[static_cast<size_t>(id)]);
        pair.id = static_cast<int32_t>(id);
        return true;
    });
    for (const Piece& piece : pieces)
        if (piece.begin != piece.end) add_ids(piece, text, bytes_, unknown_, out);
}

// --- Unigram ---------------------------------------------------------------------------------------------------------

UnigramPieces::UnigramPieces(const Strings& tokens, std::vector<float> scores, std::vector<int32_t> bytes,
                             int32_t unknown, float unknown_score)
    : tokens_(tokens), scores_(std::move(scores)), bytes_(std::move(bytes)), unknown_(unknown),
      unknown_score_(unknown_score) {
    for (uint32_t i = 0; i < tokens_.size(); i++)
        if (!std::isnan(scores_[i]) && !tokens_.at(i).empty()) sorted_.push_back(i);
    std::sort(sorted_.begin(), sorted_.end(), [&](uint32_t a, uint32_t b) { return tokens_.at(a) < tokens_.at(b); });
}

// Tries every token that begins at `begin`. The sorted tokens that begin with the text's next bytes are a range, which
// each byte narrows. Sums are float32, so that ties and near ties are decided as in the trained model.
void UnigramPieces::extend(std::string_view text, uint32_t begin, uint32_t character_end,
                           std::vector<Best>& best) const {
    const float till_here = best[begin].score;
    bool has_character = false;
    auto first = sorted_.begin(), last = sorted_.end();
    for (uint32_t end = begin; end < text.size(); end++) {
        const size_t depth = end - begin;
        const auto byte = static_cast<uint8_t>(text[end]);
        const auto byte_of = [&](uint32_t id) { return static_cast<uint8_t>(tokens_.at(id)[depth]); };
        first = std::lower_bound(first, last, byte, [&](uint32_t id, uint8_t b) { return byte_of(id) < b; });
        last = std::upper_bound(first, last, byte, [&](uint8_t b, uint32_t id) { return b < byte_of(id); });
        if (first == last) break;
        if (tokens_.at(*first).size() != depth + 1) continue;
        const float score = scores_[*first] + till_here;
        Best& target = best[end + 1];
        if (target.begin < 0 || score > target.score)
            target = {score, static_cast<int32_t>(begin), static_cast<int32_t>(*first)};
        has_character |= end + 1 == character_end;
        if (++first == last) break;  // no token is longer
    }
    const float score = unknown_score_ + till_here;
    Best& target = best[character_end];
    if (!has_character && (target.begin < 0 || score > target.score))
        target = {score, static_cast<int32_t>(begin), -1};
}

void UnigramPieces::encode(std::string_view text, std::vector<int32_t>& out) const {
    if (text.size() > INT32_MAX) throw std::length_error("a text of more than 2^31 bytes");
    const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
    std::vector<Best> best(text.size() + 1);
    for (size_t i = 0; i < text.size();) {
        const int step = character_size(bytes + i, bytes + text.size());
        if (step == 0) throw std::invalid_argument("the text is not UTF-8");
        extend(text, static_cast<uint32_t>(i), static_cast<uint32_t>(i) + static_cast<uint32_t>(step), best);
        i += static_cast<size_t>(step);
    }
    std::vector<Piece> pieces;
    for (auto end = static_cast<int32_t>(text.size()); end > 0; end = pieces.back().begin) {
        const Best& last = best[static_cast<size_t>(end)];
        pieces.push_back({last.id, static_cast<uint32_t>(last.begin), static_cast<uint32_t>(end), 0, 0});
    }
    for (size_t i = pieces.size(); i-- > 0;) add_ids(pieces[i], text, bytes_, unknown_, out);
}

}  // namespace unspool
