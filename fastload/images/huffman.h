/* Huffman codes of a JPEG, decoded as fast as one core can: bit for bit what libjpeg's own decoder makes of them.
 *
 * Three quarters of a decode are Huffman codes. Each begins where the one before it ends, so their speed is that of one
 * chain: look up, shift, look up. What makes the chain short:
 *   - A look-up of 11 bits yields up to two numbers (PAIR_BITS). The first one is in the table, the second one is computed
 *     from the bits behind its code, off the chain.
 *   - The next look-up comes before the numbers of this one are stored and before more bits are loaded.
 *   - One branch covers the end of a block, a full block, long codes and numbers, and what is damaged.
 *   - One comparison covers stuffed bytes, markers and the end of the data: `stop`.
 * Blocks that no pixel needs take other tables, which pass over as many numbers as begin in 12 bits (SKIP_BITS).
 *
 * It takes the place of libjpeg's decoder (scan.h) for one interleaved scan of 8 bits. All other files, and each that is odd
 * in any way, are libjpeg's: of an odd one the image is decoded again from its first byte. So the texts of errors are
 * libjpeg's as well, and no private state of libjpeg has to be known. ITU-T T.81, annexes C and F, is the definition.
 *
 * Rejected: 12 or 13 bits a look-up (no faster, and the tables of an image leave the first cache), removing stuffed bytes
 * before (a copy), two positions at once (the instructions are the limit by then), other instructions than plain C's (3 %).
 */
#ifndef FASTLOAD_HUFFMAN_H
#define FASTLOAD_HUFFMAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#include "blocks.h"

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAVE_HUFFMAN 1
#endif

static bool use_huffman;           /* set once, at import; tests switch it */
static size_t small_scan = 4096;   /* bytes: to make tables for fewer takes longer than they save; tests change it */

#define MOST_COMPONENTS 4
#define MOST_BLOCKS 10 /* of an MCU in one scan: ITU-T T.81, B.2.3 */

#ifdef HAVE_HUFFMAN

#define INLINE __attribute__((always_inline)) static inline
#define RARE __attribute__((noinline)) static
#define UNLIKELY(x) __builtin_expect(x, 0)

#define PAIR_BITS 11   /* 8 KB a table: those of an image fit into the first cache */
#define SKIP_BITS 12
#define DC_BITS 9
#define WIDEST_TABLED 10 /* bits of a number in the tables; 2 * (SKIP_BITS + WIDEST_TABLED) + SKIP_BITS are 56 */
#define END 64           /* added to an entry's advance: the block ends behind its numbers */
#define NOT_TABLED 127   /* the advance of an entry whose code or number is too long, or wrong */

/* ---------------------------------------------------------------- bits */

typedef struct {
    uint64_t bits;    /* the next ones, from the top */
    unsigned count;   /* of them, in its lowest 6 bits; what is above was not cleared, which would take time */
    unsigned made_up; /* zeros among them, from behind the end of the data */
    const uint8_t *next, *end;
    const uint8_t *stop; /* up to here bytes may be loaded by 8: a 0xff comes next, or the end is near */
} Bits;

INLINE void find_stop(Bits *b) {
    const uint8_t *found = memchr(b->next, 0xff, (size_t)(b->end - b->next)), *last = b->end - 8; /* a header precedes it */
    b->stop = found && found < last ? found : last;
}

/* Byte by byte: past stuffed bytes, and not past a marker. */
RARE Bits refill_bytes(Bits b) {
    b.count &= 63;
    while (b.count < 56) {
        uint64_t byte = 0;
        if (b.next < b.end && *b.next != 0xff) {
            byte = *b.next++;
        } else if (b.end - b.next >= 2 && b.next[1] == 0) {
            byte = 0xff;
            b.next += 2;
            find_stop(&b);
        } else {
            b.made_up += 8;
        }
        b.bits |= byte << (56 - b.count);
        b.count += 8;
    }
    return b;
}

/* Makes them at least 56. Below the last whole byte `bits` has some of the byte at `next`: it will be loaded again. */
INLINE void refill(Bits *b) {
    const uint8_t *after = b->next + (~b->count >> 3 & 7);
    if (UNLIKELY(after > b->stop)) {
        *b = refill_bytes(*b);
        return;
    }
    uint64_t word;
    memcpy(&word, b->next, 8);
    b->bits |= __builtin_bswap64(word) >> (b->count & 63);
    b->next = after;
    b->count |= 56;
}

/* Drops as many as the lowest 6 bits of `count` say. */
INLINE void drop(Bits *b, unsigned count) {
    b->bits <<= count & 63;
    b->count -= count;
}

/* The number of `size` bits at the top of `bits`: T.81, F.2.2.1, EXTEND. In this form no compiler makes a branch of it. */
INLINE int number_at(uint64_t bits, unsigned size) {
    const int64_t negative = ~((int64_t)bits >> 63); /* all bits or none */
    const int64_t magnitude = (int64_t)((bits ^ (uint64_t)negative) >> 1 >> (~size & 63));
    return (int)((magnitude ^ negative) - negative);
}

/* ---------------------------------------------------------------- tables */

/* A table as the file has it, and what finds the length of a code of any length: T.81, F.2.2.3. */
typedef struct {
    uint8_t counts[17], symbols[256];
    uint8_t lengths[256]; /* of the code of a symbol */
    uint32_t limits[18]; /* of 16 bits: a code of length n is below limits[n]; behind the longest there is none */
    int firsts[17];      /* the place in `symbols` of a code of length n, less the code */
} Codes;

typedef struct {
    Codes codes;
    bool has_skips;
    uint32_t pairs[1 << PAIR_BITS]; /* see pair_entry */
    uint16_t skips[1 << SKIP_BITS]; /* bits that it takes, advance << 6 */
} AcTable;

typedef struct {
    Codes codes;
    uint16_t sizes[1 << DC_BITS]; /* bits of code and number, size of the number << 6; 0: a longer code */
} DcTable;

/* The tables of an image. */
typedef struct {
    AcTable ac[2];
    DcTable dc[2];
    int hits; /* images that found them made, less those that came with others */
} Tables;

/* Two images' in each thread: those that most images share, and those of the last image with tables of its own. */
static _Thread_local Tables kept_tables[2];

/* Whether it ends a block: libjpeg takes each number without bits for an end, but the run of 16 zeros. */
static bool ends_block(int symbol) { return (symbol & 15) == 0 && symbol >> 4 != 15; }

/* The code at the beginning of a window of bits. */
typedef struct {
    uint8_t length; /* 0: it is longer than the window */
    uint8_t symbol;
} Code;

/* Whether the codes are now those of `table`, and usable. */
static bool make_codes(Codes *codes, const JHUFF_TBL *table) {
    uint32_t code = 0;
    int place = 0;
    memset(codes, 0, sizeof *codes);
    for (int length = 1; length <= 16; length++) {
        codes->firsts[length] = place - (int)code;
        place += table->bits[length];
        code += table->bits[length];
        if (place > 256 || code > 1u << length) return false;
        codes->limits[length] = code << (16 - length);
        code <<= 1;
        for (int i = place - table->bits[length]; i < place; i++) {
            uint8_t *known = codes->lengths + table->huffval[i];
            if (*known) return false; /* a second code for a symbol: read_ac could not tell which one it was */
            *known = (uint8_t)length;
        }
    }
    codes->limits[17] = 1 << 16;
    memcpy(codes->counts, table->bits, sizeof codes->counts);
    memcpy(codes->symbols, table->huffval, sizeof codes->symbols);
    return true;
}

static bool same_codes(const Codes *codes, const JHUFF_TBL *table) {
    return !memcmp(codes->counts + 1, table->bits + 1, sizeof codes->counts - 1) &&
           !memcmp(codes->symbols, table->huffval, sizeof codes->symbols) && codes->limits[17];
}

/* For each window of `width` bits the code that it begins with. */
static void spread_codes(const Codes *codes, int width, Code *windows) {
    memset(windows, 0, sizeof *windows << width);
    Code *to = windows;
    for (int length = 1, place = 0; length <= width; length++)
        for (int i = 0; i < codes->counts[length]; i++, place++)
            for (int copies = 1 << (width - length); copies > 0; copies--)
                *to++ = (Code){(uint8_t)length, codes->symbols[place]};
}

static int code_size(Code code) { return code.symbol & 15; }
static int code_run(Code code) { return code.symbol >> 4; }

/* From the lowest bit on: bits that it takes (6), size of the second number (4), advance to the second one (7), to the
 * first one (5), the first number (10). A single number is the second one, with a first one of 0 in its place. */
static uint32_t pair_entry(int bits, int size, int advance, int to_first, int first) {
    return (uint32_t)(bits | size << 6 | advance << 10 | to_first << 17) | (uint32_t)first << 22;
}

/* The entry of a window whose first code is `one`, and whose second one is not in it or not tabled. */
static uint32_t single_entry(Code one) {
    if (code_size(one) > WIDEST_TABLED) return pair_entry(0, 0, NOT_TABLED, 0, 0);
    if (ends_block(one.symbol)) return pair_entry(one.length, 0, END, 1, 0);
    return pair_entry(one.length + code_size(one), code_size(one), code_run(one) + 1, code_run(one) + 1, 0);
}

/* For each number of bits that are left behind a first number, and each value of them: what the second code adds to an
 * entry; 0: it is not among them. Those of n bits begin at 1 << n. */
static void make_seconds(const Code *windows, uint32_t *seconds) {
    for (int left = 0; left < PAIR_BITS; left++)
        for (uint32_t rest = 0; rest < 1u << left; rest++) {
            const Code two = windows[rest << (PAIR_BITS - left)];
            const bool tabled = two.length && two.length <= left && code_size(two) <= WIDEST_TABLED;
            const int size = code_size(two), advance = ends_block(two.symbol) ? END : code_run(two) + 1;
            seconds[(1 << left) + rest] = tabled ? pair_entry(two.length + size, size, advance, 0, 0) : 0;
        }
}

/* The entries of the windows that begin with a code, in order; returns the place behind them. All numbers of its size have
 * the same second codes, so that an entry is a sum. This is 3 times as fast as to look at each window by itself, which
 * counts for files that have tables of their own. */
static uint32_t *make_pairs(uint32_t *to, Code one, const uint32_t *seconds) {
    const int size = code_size(one), left = PAIR_BITS - one.length - size, step = code_run(one) + 1;
    const uint32_t single = single_entry(one);
    if (left < 0 || size >= WIDEST_TABLED || ends_block(one.symbol)) {
        for (int copies = 1 << (PAIR_BITS - one.length); copies > 0; copies--) *to++ = single;
        return to;
    }
    for (int value = 0; value < 1 << size; value++) {
        const int number = value < (1 << size) / 2 ? value - (1 << size) + 1 : value;
        const uint32_t first = pair_entry(one.length + size, 0, step, step, number), *second = seconds + (1 << left);
        for (int rest = 0; rest < 1 << left; rest++) *to++ = second[rest] ? first + second[rest] : single;
    }
    return to;
}

static uint16_t make_skip(const Code *windows, uint32_t window) {
    int bits = 0, advance = 0;
    while (bits < SKIP_BITS) {
        const Code code = windows[window << bits & ((1 << SKIP_BITS) - 1)];
        if (!code.length || code.length > SKIP_BITS - bits || code_size(code) > WIDEST_TABLED) break;
        if (ends_block(code.symbol)) return (uint16_t)((bits + code.length) | (END + advance) << 6);
        if (advance + code_run(code) + 1 >= END - 1) break;
        bits += code.length + code_size(code);
        advance += code_run(code) + 1;
    }
    return (uint16_t)(advance ? bits | advance << 6 : NOT_TABLED << 6);
}

static bool make_ac(AcTable *table, const JHUFF_TBL *from) {
    table->has_skips = false;
    if (!make_codes(&table->codes, from)) return false;
    Code windows[1 << PAIR_BITS];
    uint32_t seconds[1 << PAIR_BITS], *to = table->pairs;
    spread_codes(&table->codes, PAIR_BITS, windows);
    make_seconds(windows, seconds);
    for (int length = 1, place = 0; length <= PAIR_BITS; length++)
        for (int i = 0; i < table->codes.counts[length]; i++, place++)
            to = make_pairs(to, (Code){(uint8_t)length, table->codes.symbols[place]}, seconds);
    while (to < table->pairs + (1 << PAIR_BITS)) *to++ = pair_entry(0, 0, NOT_TABLED, 0, 0);
    return true;
}

RARE void make_skips(AcTable *table) {
    Code windows[1 << SKIP_BITS];
    spread_codes(&table->codes, SKIP_BITS, windows);
    for (uint32_t window = 0; window < 1 << SKIP_BITS; window++) table->skips[window] = make_skip(windows, window);
    table->has_skips = true;
}

static bool make_dc(DcTable *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from)) return false;
    Code windows[1 << DC_BITS];
    spread_codes(&table->codes, DC_BITS, windows);
    for (uint32_t window = 0; window < 1 << DC_BITS; window++) {
        const Code code = windows[window];
        table->sizes[window] = (uint16_t)(code.length ? (code.length + code_size(code)) | code_size(code) << 6 : 0);
    }
    return true;
}

/* ---------------------------------------------------------------- a block */

/* A code of any length, and its number. */
typedef struct {
    Bits bits; /* behind them */
    int symbol; /* -1: there is no such code */
    int number;
} Symbol;

RARE Symbol read_symbol(Bits b, const Codes *codes) {
    refill(&b);
    const uint32_t window = (uint32_t)(b.bits >> 48);
    int length = 1;
    while (window >= codes->limits[length]) length++;
    if (length > 16) return (Symbol){b, -1, 0};
    const int symbol = codes->symbols[(codes->firsts[length] + (int)(window >> (16 - length))) & 255], size = symbol & 15;
    drop(&b, (unsigned)length);
    const int number = number_at(b.bits, (unsigned)size);
    drop(&b, (unsigned)size);
    return (Symbol){b, symbol, number};
}

/* Reads the difference of a DC coefficient. There are at least 31 bits. */
INLINE bool read_dc(Bits *b, const DcTable *table, int *difference) {
    const unsigned entry = table->sizes[b->bits >> (64 - DC_BITS)], size = entry >> 6;
    if (UNLIKELY(!entry)) {
        const Symbol symbol = read_symbol(*b, &table->codes);
        *b = symbol.bits;
        *difference = symbol.number;
        return symbol.symbol >= 0;
    }
    *difference = number_at(b->bits << ((entry - size) & 63), size);
    drop(b, entry);
    return true;
}

/* How many bits a number with `run` zeros before it takes. */
INLINE unsigned code_bits(const Codes *codes, unsigned run, int number) {
    const unsigned size = number ? 32 - (unsigned)__builtin_clz((unsigned)(number < 0 ? -number : number)) : 0;
    return codes->lengths[run << 4 | size] + size;
}

/* Reads the other 63 coefficients of a block whose numbers are 0. */
INLINE bool read_ac(Bits *b, const AcTable *table, int16_t *block) {
    unsigned place = 0; /* of the last number */
    for (;;) {
        refill(b);
        uint32_t next = table->pairs[b->bits >> (64 - PAIR_BITS)];
        for (;;) {
            for (int i = 0; i < 2; i++) { /* each takes at most 21 bits, and the look-up behind them 11 */
                const uint32_t entry = next;
                const uint64_t bits = b->bits;
                const unsigned size = entry >> 6 & 15, advance = entry >> 10 & 127, first = place + (entry >> 17 & 31);
                drop(b, entry);
                /* In this order. The processor takes the oldest first, and the chain is not to wait for the stores. */
                next = table->pairs[b->bits >> (64 - PAIR_BITS)];
                if (place + advance > 62) {
                    const int16_t number = (int16_t)((int32_t)entry >> 22);
                    if ((advance >= END && advance != NOT_TABLED && first < 63) || advance == END) {
                        block[ZIGZAG[first]] |= number;
                        return true;
                    }
                    if (place + advance == 63) {
                        block[ZIGZAG[first]] = number;
                        block[63] = (int16_t)number_at(bits << ((entry - size) & 63), size);
                        return true;
                    }
                    b->bits = bits;
                    b->count += entry;
                    if (first != 63) goto one;
                    drop(b, code_bits(&table->codes, first - place - 1, number)); /* what follows is the next block's */
                    block[63] = number;
                    return true;
                }
                block[ZIGZAG[first]] = (int16_t)((int32_t)entry >> 22);
                place += advance;
                block[ZIGZAG[place]] = (int16_t)number_at(bits << ((entry - size) & 63), size);
            }
            refill(b);
        }
    one:; /* The look-up would lead behind the block, or there is none. */
        const Symbol symbol = read_symbol(*b, &table->codes);
        *b = symbol.bits;
        if (symbol.symbol < 0) return false;
        if (ends_block(symbol.symbol)) return true;
        place += (unsigned)(symbol.symbol >> 4) + 1;
        if (place > 63) return false;
        block[ZIGZAG[place]] = (int16_t)symbol.number;
        if (place == 63) return true;
    }
}

/* Passes over the other 63 coefficients of a block. */
INLINE bool skip_ac(Bits *b, const AcTable *table) {
    unsigned place = 0;
    for (;;) {
        refill(b);
        uint32_t next = table->skips[b->bits >> (64 - SKIP_BITS)];
        for (;;) {
            for (int i = 0; i < 2; i++) {
                const uint32_t entry = next;
                const uint64_t bits = b->bits;
                const unsigned advance = entry >> 6;
                drop(b, entry);
                next = table->skips[b->bits >> (64 - SKIP_BITS)];
                if (place + advance > 62) {
                    if (advance >= END && advance != NOT_TABLED && place + advance - END < 63) return true;
                    if (place + advance == 63) return true;
                    b->bits = bits;
                    b->count += entry;
                    goto one;
                }
                place += advance;
            }
            refill(b);
        }
    one:;
        const Symbol symbol = read_symbol(*b, &table->codes);
        *b = symbol.bits;
        if (symbol.symbol < 0) return false;
        if (ends_block(symbol.symbol)) return true;
        place += (unsigned)(symbol.symbol >> 4) + 1;
        if (place >= 63) return place == 63;
    }
}

/* ---------------------------------------------------------------- an MCU */

/* What is left of the scan of an image. */
typedef struct {
    Bits bits;
    const uint8_t *begin;           /* of its data */
    size_t mcu;                     /* the next one, from the scan's first */
    int blocks;                     /* of an MCU */
    uint8_t component[MOST_BLOCKS]; /* of each */
    AcTable *ac[MOST_COMPONENTS];
    DcTable *dc[MOST_COMPONENTS];
    int last_dc[MOST_COMPONENTS];
    unsigned interval, until_restart; /* MCUs; an interval of 0: without restarts */
    unsigned restarts;                /* that were passed */
    bool has_new_tables;              /* which no image before had */
} Scan;

/* At a restart marker, which has to be the next one and right behind the bits that were read. */
static bool restart(Scan *scan) {
    Bits *b = &scan->bits;
    if ((b->count & 63) - b->made_up >= 8 || b->end - b->next < 2 || b->next[0] != 0xff) return false;
    if (b->next[1] != JPEG_RST0 + (scan->restarts & 7)) return false;
    b->next += 2;
    b->bits = 0;
    b->count = b->made_up = 0;
    find_stop(b);
    memset(scan->last_dc, 0, sizeof scan->last_dc);
    scan->restarts++;
    scan->until_restart = scan->interval;
    return true;
}

/* Before an MCU. */
INLINE bool pass_restart(Scan *scan) {
    scan->mcu++;
    if (!scan->interval) return true;
    if (scan->until_restart == 0 && !restart(scan)) return false;
    scan->until_restart--;
    return true;
}

INLINE bool add_dc(Scan *scan, Bits *b, int c) {
    int difference;
    refill(b);
    if (UNLIKELY(!read_dc(b, scan->dc[c], &difference))) return false;
    const int dc = scan->last_dc[c] += difference;
    return dc == (int16_t)dc; /* no encoder writes others, and here no sum of them can overflow */
}

/* After an MCU. */
INLINE bool keep_bits(Scan *scan, Bits b) {
    scan->bits = b;
    return b.made_up <= (b.count & 63); /* none of those that were read */
}

/* Reads an MCU into blocks whose numbers are 0. False: it is odd. */
static bool read_blocks(Scan *scan, JBLOCKROW *blocks) {
    if (!pass_restart(scan)) return false;
    Bits b = scan->bits;
    for (int i = 0; i < scan->blocks; i++) {
        const int c = scan->component[i];
        if (UNLIKELY(!add_dc(scan, &b, c))) return false;
        int16_t *block = blocks[i][0];
        block[0] = (int16_t)scan->last_dc[c];
        if (UNLIKELY(!read_ac(&b, scan->ac[c], block))) return false;
    }
    return keep_bits(scan, b);
}

/* Passes over an MCU. False: it is odd. */
static bool skip_blocks(Scan *scan) {
    if (!pass_restart(scan)) return false;
    Bits b = scan->bits;
    for (int i = 0; i < scan->blocks; i++) {
        const int c = scan->component[i];
        if (UNLIKELY(!scan->ac[c]->has_skips)) make_skips(scan->ac[c]);
        if (UNLIKELY(!add_dc(scan, &b, c) || !skip_ac(&b, scan->ac[c]))) return false;
    }
    return keep_bits(scan, b);
}

/* ---------------------------------------------------------------- places in the scan */

/* Bits of the scan's data before the next MCU, stuffed bytes among them. */
static uint64_t tell(const Scan *scan) {
    const Bits *b = &scan->bits;
    const unsigned unread = (b->count & 63) - b->made_up;
    const uint8_t *byte = b->next; /* of those that are not whole any more, the first one */
    for (unsigned i = 0; i < unread; i += 8) byte -= byte - scan->begin >= 2 && byte[-1] == 0 && byte[-2] == 0xff ? 2 : 1;
    return (uint64_t)(byte - scan->begin) * 8 + (-unread & 7);
}

/* Goes on with an MCU at a place that `tell` has told. False: it is not in the data. */
static bool seek(Scan *scan, uint64_t place, size_t mcu, const int16_t *last_dc) {
    Bits *b = &scan->bits;
    if (place / 8 > (uint64_t)(b->end - scan->begin)) return false;
    *b = (Bits){.next = scan->begin + place / 8, .end = b->end};
    find_stop(b);
    refill(b);
    drop(b, place & 7);
    for (int c = 0; c < MOST_COMPONENTS; c++) scan->last_dc[c] = last_dc[c];
    scan->mcu = mcu;
    if (!scan->interval || !mcu) return true;
    scan->restarts = (unsigned)((mcu - 1) / scan->interval); /* that before this MCU comes with it */
    scan->until_restart = scan->interval - 1 - (unsigned)((mcu - 1) % scan->interval);
    return true;
}

/* ---------------------------------------------------------------- the tables of a scan */

static const JHUFF_TBL *dc_of(const struct jpeg_decompress_struct *jpeg, int c) {
    return jpeg->dc_huff_tbl_ptrs[jpeg->cur_comp_info[c]->dc_tbl_no];
}

static const JHUFF_TBL *ac_of(const struct jpeg_decompress_struct *jpeg, int c) {
    return jpeg->ac_huff_tbl_ptrs[jpeg->cur_comp_info[c]->ac_tbl_no];
}

/* Whether each component has tables, of the two that a baseline file may have. */
static bool has_tables(const struct jpeg_decompress_struct *jpeg) {
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        const jpeg_component_info *component = jpeg->cur_comp_info[c];
        const int dc = component->dc_tbl_no, ac = component->ac_tbl_no;
        if (dc < 0 || dc > 1 || ac < 0 || ac > 1 || !dc_of(jpeg, c) || !ac_of(jpeg, c)) return false;
    }
    return true;
}

static bool are_made(const Scan *scan, int c, const struct jpeg_decompress_struct *jpeg) {
    return same_codes(&scan->dc[c]->codes, dc_of(jpeg, c)) && same_codes(&scan->ac[c]->codes, ac_of(jpeg, c));
}

/* Points the scan at kept tables. Whether they are those of the image. */
static bool use_tables(Scan *scan, const struct jpeg_decompress_struct *jpeg, Tables *tables) {
    bool made = true;
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        scan->dc[c] = tables->dc + jpeg->cur_comp_info[c]->dc_tbl_no;
        scan->ac[c] = tables->ac + jpeg->cur_comp_info[c]->ac_tbl_no;
        made = made && are_made(scan, c, jpeg);
    }
    return made;
}

/* Finds the tables of an image, or makes them where that is worth it. */
static bool find_tables(Scan *scan, const struct jpeg_decompress_struct *jpeg) {
    enum { MOST_HITS = 8 };
    if (!has_tables(jpeg)) return false;
    for (int i = 0; i < 2; i++)
        if (use_tables(scan, jpeg, kept_tables + i)) {
            kept_tables[i].hits += kept_tables[i].hits < MOST_HITS;
            return true;
        }
    if ((size_t)(scan->bits.end - scan->bits.next) < small_scan) return false;
    const int older = kept_tables[0].hits > kept_tables[1].hits;
    kept_tables[!older].hits -= kept_tables[!older].hits > 0;
    kept_tables[older].hits = 0;
    use_tables(scan, jpeg, kept_tables + older);
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        if (!same_codes(&scan->dc[c]->codes, dc_of(jpeg, c)) && !make_dc(scan->dc[c], dc_of(jpeg, c))) return false;
        if (!same_codes(&scan->ac[c]->codes, ac_of(jpeg, c)) && !make_ac(scan->ac[c], ac_of(jpeg, c))) return false;
    }
    scan->has_new_tables = true;
    return true;
}

#else

typedef struct {
    int blocks;
} Scan;

#endif
#endif
