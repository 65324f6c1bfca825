// Vocabularies: lookup of strings by text, two ways of merging pieces of text into tokens, and the most probable
// tokenization of a text. Strings are copied from the file, because another program may overwrite or truncate it while
// it is mapped.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace unspool {

// The first place to look for a hash's entry, in a table of any size. The upper half of the hash is used to compare
// entries.
template <class Entry> size_t slot_in(const std::vector<Entry>& table, uint64_t hash) {
    return static_cast<size_t>((hash & UINT32_MAX) * table.size() >> 32);
}
template <class Entry> size_t slot_after(const std::vector<Entry>& table, size_t slot) {
    return slot + 1 < table.size() ? slot + 1 : 0;
}

// An array of strings, copied from GGUF's layout: each has its length in 8 bytes, then its bytes, which must be UTF-8.
class Strings {
public:
    // Reads `count` strings from `position` on; stops before the first that is incomplete or not UTF-8.
    Strings(const uint8_t* bytes, uint64_t size, uint64_t position, uint64_t count);

    uint64_t size() const { return starts_.size() - 1; }
    uint64_t end() const { return position_ + 8 * size() + starts_.back(); }  // of those read, in the file
    std::string_view at(uint64_t i) const {
        return {reinterpret_cast<const char*>(text_.data()) + starts_[i], starts_[i + 1] - starts_[i]};
    }

    // A hash table of strings by text, without the empty string. Equal strings map to the first; `twice` is the first
    // repeat.
    void index();
    int64_t find(std::string_view text) const { return find(text, hash(text)); }  // -1: not found
    int64_t twice() const { return twice_; }

    // The parts of `find`, for lookups of many strings at once. A table of this size does not fit in the cache, and
    // waiting for each entry took most of the time to make a tokenizer.
    uint64_t hash(std::string_view text) const;
    void prefetch_slot(uint64_t hash) const { __builtin_prefetch(&table_[slot_in(table_, hash)]); }
    void prefetch_text(uint64_t hash) const;
    int64_t find(std::string_view text, uint64_t hash) const;

private:
    uint32_t tag_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> 32) & ~place_mask_; }

    std::vector<uint8_t> text_;     // all strings, concatenated
    std::vector<uint32_t> starts_;  // offset of each string, and the end of the last
    uint64_t position_;
    // An entry's lower bits are 1 + the index of a string, the upper bits are those of its hash; 0 is an empty entry.
    std::vector<uint32_t> table_;
    uint32_t place_mask_ = 0;
    uint64_t seed_ = 0;
    int64_t twice_ = -1;
};

// A piece of a text during merging: a linked list in an array. A piece that was merged into another is empty.
struct Piece {
    int32_t id;
    uint32_t begin, end;
    int32_t before, after;
};

// Two neighbouring pieces that could be merged: the smallest priority first, then the leftmost.
struct Pair {
    double priority;
    int32_t left, right, id;
    uint32_t end;
    bool operator<(const Pair& other) const {  // a heap returns its largest element first
        return priority != other.priority ? priority > other.priority : left > other.left;
    }
};

struct Scratch {
    std::vector<Piece> pieces;
    std::vector<Pair> heap;
    std::string text;
};

// Byte-pair encoding: merges are ranked pairs of tokens.
class BytePairs {
public:
    // `merges` are "left right". If one is invalid, `fault` is its index. Words are merged from their bytes, each of
    // which must be a token. With `bytes` (256 ids), they are merged from their characters, and a character without a
    // token is replaced by the ids of its bytes.
    BytePairs(const Strings& tokens, const Strings& merges, bool whole_words, std::vector<int32_t> bytes);

    int64_t fault() const { return fault_; }
    const std::vector<int>& missing() const { return missing_; }  // bytes without a token
    void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

private:
    struct Merge {
        uint64_t pair;  // left << 32 | right
        uint32_t rank, id;
    };
    size_t slot_of(uint64_t pair) const;
    void add_group(const Strings& merges, uint64_t first, uint64_t count);
    void add_bytes(std::string_view word, std::vector<Piece>& pieces) const;

    const Strings& tokens_;
    bool whole_words_;
    std::vector<int32_t> bytes_;
    int32_t byte_ids_[256];
    uint8_t spelled_[256][2];  // the character that represents a byte, in UTF-8
    uint8_t spelled_size_[256];
    std::vector<int> missing_;
    std::vector<Merge> table_;
    uint64_t seed_ = 0;
    int64_t fault_ = -1, last_ = -1;
};

// SentencePiece's merging: any two neighbours whose concatenation is a token, the best score first.
class ScoredPieces {
public:
    // `scores`: a float32 per token, aligned or not. `plain`: whether text may become that token. `bytes`: 256 ids, or
    // empty for `unknown`.
    ScoredPieces(const Strings& tokens, const uint8_t* scores, std::vector<bool> plain, std::vector<int32_t> bytes,
                 int32_t unknown);

    void encode(std::string_view text, Scratch& scratch, std::vector<int32_t>& out) const;

private:
    int64_t find(std::string_view text) const;

    const Strings& tokens_;
    std::vector<float> scores_;
    std::vector<bool> plain_;
    std::vector<int32_t> bytes_;
    int32_t unknown_;
};

// SentencePiece's unigram model: of all tokenizations of a text, the one with the largest sum of scores.
class UnigramPieces {
public:
    // `scores`: one per token, NaN for tokens that text must not become. A character without a token scores
    // `unknown_score`; it becomes the ids of its bytes, or, together with unknown neighbours, one `unknown`.
    UnigramPieces(const Strings& tokens, std::vector<float> scores, std::vector<int32_t> bytes, int32_t unknown,
                  float unknown_score);

    void encode(std::string_view text, std::vector<int32_t>& out) const;

private:
    struct Best {  // the best tokenization up to a place: its sum of scores, its last token, and that token's start
        float score = 0;
        int32_t begin = -1, id = -1;
    };
    void extend(std::string_view text, uint32_t begin, uint32_t character_end, std::vector<Best>& best) const;

    const Strings& tokens_;
    std::vector<float> scores_;
    std::vector<uint32_t> sorted_;  // tokens that text may become, sorted by text
    std::vector<int32_t> bytes_;
    int32_t unknown_;
    float unknown_score_;
};

}  // namespace unspool
