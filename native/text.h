// Vocabularies: strings, found by their text, two ways of merging pieces of text into tokens, and the best way of
// cutting a text into tokens that have probabilities. What is read from a file is copied: another program may overwrite or cut the file while it is mapped.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace unspool {

// Where a hash's entry is looked for first in a table of any size. The hash's upper half is left for telling entries
// apart.
template <class Entry> size_t slot_in(const std::vector<Entry>& table, uint64_t hash) {
    return static_cast<size_t>((hash & UINT32_MAX) * table.size() >> 32);
}
template <class Entry> size_t slot_after(const std::vector<Entry>& table, size_t slot) {
    return slot + 1 < table.size() ? slot + 1 : 0;
}

// An array of strings, copied from GGUF's layout: for each its length in 8 bytes, then its bytes, which must be UTF-8.
class Strings {
public:
    // Reads `count` strings from `position` on, and stops before the first that is not whole or not UTF-8.
    Strings(const uint8_t* bytes, uint64_t size, uint64_t position, uint64_t count);

    uint64_t size() const { return starts_.size() - 1; }
    uint64_t end() const { return position_ + 8 * size() + starts_.back(); }  // of those read, in the file
    std::string_view at(uint64_t i) const {
        return {reinterpret_cast<const char*>(text_.data()) + starts_[i], starts_[i + 1] - starts_[i]};
    }

    // A table by text. Empty strings are not in it. Of equal ones the first is, and `twice` is the first to repeat one.
    void index();
    int64_t find(std::string_view text) const { return find(text, hash(text)); }  // -1: there is no such string
    int64_t twice() const { return twice_; }

    // The parts of `find`, for many at once: a table of this size is far away, and waiting for one entry at a time
    // took most of a tokenizer's making.
    uint64_t hash(std::string_view text) const;
    void prefetch_slot(uint64_t hash) const { __builtin_prefetch(&table_[slot_in(table_, hash)]); }
    void prefetch_text(uint64_t hash) const;
    int64_t find(std::string_view text, uint64_t hash) const;

private:
    uint32_t tag_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> 32) & ~place_mask_; }

    std::vector<uint8_t> text_;     // one string after another
    std::vector<uint32_t> starts_;  // of each in it, and the end of the last
    uint64_t position_;
    // An entry's lower bits are 1 + a string's place, the others the upper ones of its hash; none is zero.
    std::vector<uint32_t> table_;
    uint32_t place_mask_ = 0;
    uint64_t seed_ = 0;
    int64_t twice_ = -1;
};

// A piece of a text while it is being merged: a linked list in an array. A piece that was merged away is empty.
struct Piece {
    int32_t id;
    uint32_t begin, end;
    int32_t before, after;
};

// Two neighbours that could be joined: the smallest priority first, then the leftmost.
struct Pair {
    double priority;
    int32_t left, right, id;
    uint32_t end;
    bool operator<(const Pair& other) const {  // a heap gives its largest first
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
    // `merges` are "left right". What is wrong with one is told by `fault`, the place of the first bad one. Words are
    // merged from their bytes up, each of which is a token. With `bytes`, 256 ids, they are merged from their
    // characters up, and one that no token stands for becomes the ids of its bytes.
    BytePairs(const Strings& tokens, const Strings& merges, bool whole_words, std::vector<int32_t> bytes);

    int64_t fault() const { return fault_; }
    const std::vector<int>& missing() const { return missing_; }  // bytes that no token stands for
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
    uint8_t spelled_[256][2];  // the character that stands for a byte, in UTF-8
    uint8_t spelled_size_[256];
    std::vector<int> missing_;
    std::vector<Merge> table_;
    uint64_t seed_ = 0;
    int64_t fault_ = -1, last_ = -1;
};

// SentencePiece's: any two neighbours whose union is a token, the best score first.
class ScoredPieces {
public:
    // `scores`: a float32 of every token, aligned or not. `plain`: whether text may become that token. `bytes`: 256
    // ids, or none for `unknown`.
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

// SentencePiece's unigram model: of all ways to cut a text into tokens, the one with the largest sum of scores.
class UnigramPieces {
public:
    // `scores`: of every token, NaN for one that no text becomes. A character that no token stands for is worth
    // `unknown_score`; it becomes the ids of its bytes, or one `unknown` together with its unknown neighbours.
    UnigramPieces(const Strings& tokens, std::vector<float> scores, std::vector<int32_t> bytes, int32_t unknown,
                  float unknown_score);

    void encode(std::string_view text, std::vector<int32_t>& out) const;

private:
    struct Best {  // the best way to reach a place: the sum of scores, and the last token and where it begins
        float score = 0;
        int32_t begin = -1, id = -1;
    };
    void extend(std::string_view text, uint32_t begin, uint32_t character_end, std::vector<Best>& best) const;

    const Strings& tokens_;
    std::vector<float> scores_;
    std::vector<uint32_t> sorted_;  // tokens that text may become, by their text
    std::vector<int32_t> bytes_;
    int32_t unknown_;
    float unknown_score_;
};

}  // namespace unspool
