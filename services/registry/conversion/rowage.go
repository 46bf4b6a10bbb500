package conversion

import (
	"context"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apiserver/pkg/registry/rest"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// A Table row contains ages, so it changes with the clock even if its object does not. The watch tier caches rows. For
// this reason encodeRow marks the cells that are ages, and the timestamp each is computed from.
//
// Upstream's table printers do not report which cells are ages. encodeRow finds them by printing the row again with
// shifted timestamps. A printer uses only the time since a timestamp. If all timestamps are shifted by the same
// duration, the row is the row of another moment.
//
// A word of a cell is the age of a timestamp if a shift that moves this timestamp to 60 s ago changes it to "60s".
// It is not an age if shifting all timestamps far back leaves it unchanged.
//
// rank finds the timestamp to try: it gives each timestamp another age of some seconds, and the word then identifies
// the timestamp. It keeps the order of the timestamps, because a printer may choose the latest.
//
// encodeRow tries a word only if its cell has no second duration. If it does not find the timestamp of an age, the ages
// are not complete.

// durationWord matches a duration as duration.HumanDuration formats it.
var durationWord = regexp.MustCompile(`^(([0-9]+[smhdy]){1,2}|<invalid>)$`)

// separators are the characters between the words of a cell.
const separators = " (),"

// maxDurationBytes bounds the length of a durationWord, with a margin.
const maxDurationBytes = 16

// durations returns the positions of words in a cell that look like durations.
func durations(cell string) (spans [][2]int) {
	begin := 0
	for i := 0; i <= len(cell); i++ {
		if i < len(cell) && strings.IndexByte(separators, cell[i]) < 0 {
			continue
		}
		if n := i - begin; n > 0 && n <= maxDurationBytes && durationWord.MatchString(cell[begin:i]) {
			spans = append(spans, [2]int{begin, i})
		}
		begin = i + 1
	}
	return spans
}

// cellsHead is the beginning of a row's JSON.
const cellsHead = `{"cells":[`

// encodeRow returns an object's row as JSON, and its ages. from is the time before the row was printed. encodeRow
// replaces the row's cells with their JSON.
func encodeRow(ctx context.Context, convertor rest.TableConvertor, obj runtime.Object,
	row *metav1.TableRow, from time.Time) (data []byte, ages *registryv1.RowAges, err error) {
	p := &printer{
		ctx:       ctx,
		convertor: convertor,
		obj:       obj,
		cells:     row.Cells,
		from:      from,
		to:        time.Now(),
		shifted:   map[shift][]any{},
	}
	row.Cells = make([]any, len(p.cells))
	offsets := make([]int, len(p.cells)+1)
	offsets[0] = len(cellsHead)
	for i, cell := range p.cells {
		raw, err := json.Marshal(cell)
		if err != nil {
			return nil, nil, err
		}
		row.Cells[i], offsets[i+1] = json.RawMessage(raw), offsets[i]+len(raw)+len(",")
	}
	if data, err = json.Marshal(row); err != nil {
		return nil, nil, err
	}
	ages = &registryv1.RowAges{Complete: true}
	for i, cell := range p.cells {
		text, ok := cell.(string)
		if !ok {
			continue
		}
		words := durations(text)
		if len(words) == 0 {
			continue
		}
		if len(words) == 1 {
			when, found, err := p.ageOf(i, text, words[0])
			if err != nil {
				return nil, nil, err
			}
			if found {
				ages.Ages = append(ages.Ages, ageIn(text, words[0], offsets[i], when))
				continue
			}
		}
		constant, err := p.isConstant(i)
		if err != nil {
			return nil, nil, err
		}
		ages.Complete = ages.Complete && constant
	}
	return data, ages, nil
}

// ageIn returns the age at a word of a cell. offset is the position of the cell in its row, in bytes.
func ageIn(cell string, word [2]int, offset int, when time.Time) *registryv1.Age {
	before, _ := json.Marshal(cell[:word[0]]) // every string has an encoding
	through, _ := json.Marshal(cell[:word[1]])
	return &registryv1.Age{
		Offset:  int32(offset + len(before) - len(`"`)),
		Length:  int32(len(through) - len(before)),
		Seconds: when.Unix(),
		Nanos:   int32(when.Nanosecond()),
	}
}

// printer prints an object's row several times, each time with other timestamps.
type printer struct {
	ctx       context.Context
	convertor rest.TableConvertor
	obj       runtime.Object
	// cells are the row's cells, printed between from and to.
	cells    []any
	from, to time.Time
	// timestamps are the object's timestamps. Method times sets them.
	timestamps []timestamp
	// shifted caches the cells after a shift. ranked are the cells in which each timestamp has another age. shiftedBack
	// are the cells in which all timestamps are moved by shiftBack.
	shifted             map[shift][]any
	ranked, shiftedBack []any
	// timestampByAge maps the ages in ranked to the object's timestamps.
	timestampByAge map[string]time.Time
	prints         int
}

// shift is a move of all timestamps by the same duration, after which value is ago in the past.
type shift struct {
	value time.Time
	ago   time.Duration
}

const (
	// shiftBack is a shift after which every age is different.
	shiftBack = -1000 * 24 * time.Hour
	// recentAge is the age of a shifted timestamp. Printers show it in seconds. otherRecentAge replaces it for a word
	// that already shows recentAge. halfSecond keeps the age from changing during the print.
	recentAge, otherRecentAge = 60 * time.Second, 90 * time.Second
	halfSecond                = 500 * time.Millisecond
	// firstRank is the youngest age in ranked. The other ages follow in steps of a second.
	firstRank = 10 * time.Second
	// maxTimestamps bounds the timestamps of an object whose ages are searched, because ages in ranked must be printed
	// in seconds.
	maxTimestamps = 256
	// maxPrints bounds the additional prints of a row, because CRDs can have columns of many timestamps.
	maxPrints = 16
)

// ageOf returns the timestamp whose age is a word of cell i.
func (p *printer) ageOf(i int, cell string, word [2]int) (when time.Time, found bool, err error) {
	m, err := meta.Accessor(p.obj)
	if err != nil {
		return when, false, err
	}
	created := m.GetCreationTimestamp().Time
	if found, err = p.isAgeOf(created, i, cell, word); found || err != nil {
		return created, found, err
	}
	if p.ranked == nil {
		if err = p.rank(); err != nil {
			return when, false, err
		}
	}
	age, _ := cellAt(p.ranked, i).(string)
	age, before := strings.CutPrefix(age, cell[:word[0]])
	age, after := strings.CutSuffix(age, cell[word[1]:])
	if !before || !after {
		return when, false, nil
	}
	when = p.timestampByAge[age] // zero if no timestamp has this age
	found, err = p.isAgeOf(when, i, cell, word)
	return when, found, err
}

// isAgeOf reports whether a word of cell i is the age of ts.
func (p *printer) isAgeOf(ts time.Time, i int, cell string, word [2]int) (found bool, err error) {
	if ts.IsZero() || !p.matchesAge(ts, cell[word[0]:word[1]]) {
		return false, nil
	}
	try := shift{ts, recentAge}
	if cell[word[0]:word[1]] == duration.HumanDuration(recentAge) {
		try.ago = otherRecentAge
	}
	cells, ok := p.shifted[try]
	if !ok {
		by := time.Now().Add(-try.ago - halfSecond).Sub(ts)
		if cells, err = p.print(func(t time.Time) time.Time { return t.Add(by) }); err != nil {
			return false, err
		}
		p.shifted[try] = cells
	}
	return cellAt(cells, i) == cell[:word[0]]+duration.HumanDuration(try.ago)+cell[word[1]:], nil
}

// matchesAge reports whether word was the age of ts when the row was printed.
func (p *printer) matchesAge(ts time.Time, word string) bool {
	return word == duration.HumanDuration(p.from.Sub(ts)) || word == duration.HumanDuration(p.to.Sub(ts))
}

// rank prints the row with another age for each timestamp. The latest timestamp has the age firstRank.
func (p *printer) rank() (err error) {
	var ranks []time.Time
	for _, m := range p.times() {
		ranks = append(ranks, m.value)
	}
	latestFirst := func(a, b time.Time) int { return b.Compare(a) }
	slices.SortFunc(ranks, latestFirst)
	ranks = slices.CompactFunc(ranks, time.Time.Equal)
	ageOf := func(rank int) time.Duration { return firstRank + time.Duration(rank)*time.Second }
	p.timestampByAge = map[string]time.Time{}
	for rank, ts := range ranks {
		p.timestampByAge[duration.HumanDuration(ageOf(rank))] = ts
	}
	now := time.Now().Add(-halfSecond)
	p.ranked, err = p.print(func(ts time.Time) time.Time {
		rank, _ := slices.BinarySearchFunc(ranks, ts, latestFirst)
		return now.Add(-ageOf(rank))
	})
	return err
}

// isConstant reports whether cell i is the same after all timestamps are shifted. It then contains a duration between
// two timestamps, or no duration.
func (p *printer) isConstant(i int) (bool, error) {
	if p.shiftedBack == nil {
		var err error
		if p.shiftedBack, err = p.print(func(t time.Time) time.Time { return t.Add(shiftBack) }); err != nil {
			return false, err
		}
	}
	return cellAt(p.shiftedBack, i) == p.cells[i], nil
}

// print returns the row's cells after move is applied to all timestamps, and restores the timestamps. It returns no
// cells if the object exceeds maxTimestamps or the row exceeds maxPrints.
func (p *printer) print(move func(time.Time) time.Time) ([]any, error) {
	if p.prints++; p.prints > maxPrints || len(p.times()) > maxTimestamps {
		return []any{}, nil
	}
	if err := p.ctx.Err(); err != nil {
		return nil, err
	}
	for _, m := range p.times() {
		m.set(move(m.value))
		defer m.set(m.value)
	}
	t, err := p.convertor.ConvertToTable(p.ctx, p.obj, &metav1.TableOptions{NoHeaders: true})
	if err != nil || len(t.Rows) != 1 {
		return []any{}, err
	}
	return t.Rows[0].Cells, nil
}

// cellAt returns cell i, or nil if the row has fewer cells.
func cellAt(cells []any, i int) any {
	if i < len(cells) {
		return cells[i]
	}
	return nil
}

// times returns the object's timestamps.
func (p *printer) times() []timestamp {
	if p.timestamps == nil {
		p.timestamps = timestampsOf(p.obj)
	}
	return p.timestamps
}
