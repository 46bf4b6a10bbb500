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

// A row tells ages, so it is not what it was a second ago though its object is. Whoever keeps rows is told which parts
// of one are ages, and of when. Upstream's printers do not say so; it is found out by trying. A printer sees of a time
// only how long ago it was, so the row of an object with all its times moved is the row as it is at another time. A
// word that looks like an age is that of one of the object's times if it tells seconds as soon as that is seconds ago,
// and is no age at all if it stays as it is when all times are moved. Which time to try is what the word tells where
// each time is another few seconds ago, in the order that they have: a printer may choose the latest. A word is looked
// for where it is the only one of its cell; where an age is not found the ages are not complete.

// durationWord is a word that is a duration as duration.HumanDuration writes it.
var durationWord = regexp.MustCompile(`^(([0-9]+[smhdy]){1,2}|<invalid>)$`)

// separators are what parts the words of a cell.
const separators = " (),"

// maxDurationBytes is how many bytes a durationWord has at most, with room to spare.
const maxDurationBytes = 16

// durations are where in a cell words are that look like durations.
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

// cellsHead is how a row's JSON begins.
const cellsHead = `{"cells":[`

// encodeRow is an object's row as JSON, and its ages. The row was made after from; its cells are replaced by their JSON.
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

// ageIn is the age that a word of a cell is, which begins at offset in its row.
func ageIn(cell string, word [2]int, offset int, when time.Time) *registryv1.Age {
	before, _ := json.Marshal(cell[:word[0]]) // a string has an encoding
	through, _ := json.Marshal(cell[:word[1]])
	return &registryv1.Age{
		Offset:  int32(offset + len(before) - len(`"`)),
		Length:  int32(len(through) - len(before)),
		Seconds: when.Unix(),
		Nanos:   int32(when.Nanosecond()),
	}
}

// printer prints an object's row again and again, each time with other times.
type printer struct {
	ctx       context.Context
	convertor rest.TableConvertor
	obj       runtime.Object
	// cells are the row's, made between from and to.
	cells    []any
	from, to time.Time
	// timestamps are the object's times, once they were asked for.
	timestamps []timestamp
	// shifted are the cells as they are lately after a time, ranked those where each time has an age of its own, and
	// before those where all are shiftBack.
	shifted             map[shift][]any
	ranked, shiftedBack []any
	// timestampByAge are the object's times by the ages that they have in ranked.
	timestampByAge map[string]time.Time
	prints         int
}

// shift is a time that is moved, with all others, until it is so long ago.
type shift struct {
	value time.Time
	ago   time.Duration
}

const (
	// shiftBack is by how much times are moved so that no duration stays what it was.
	shiftBack = -1000 * 24 * time.Hour
	// recentAge is how long ago a time is moved to so that its age is told by the second, and otherRecentAge the same for a
	// word that tells that already. half keeps what is told from changing meanwhile.
	recentAge, otherRecentAge = 60 * time.Second, 90 * time.Second
	halfSecond                = 500 * time.Millisecond
	// firstRank is the youngest age that times are told apart by, a second for each.
	firstRank = 10 * time.Second
	// maxTimestamps is how many times an object may have whose ages are looked for: those who rank have ages that are
	// told by the second.
	maxTimestamps = 256
	// maxPrints is how often one row is printed again at most: definitions of custom resources may have columns of
	// many times.
	maxPrints = 16
)

// ageOf is when that was whose age a word of the cell with number i is.
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
	when = p.timestampByAge[age] // zero, which is no age, where it is none of them
	found, err = p.isAgeOf(when, i, cell, word)
	return when, found, err
}

// isAgeOf says whether a word of the cell with number i is how long ago a time was.
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

// matchesAge says whether a word is how long ago a time was when the row was made.
func (p *printer) matchesAge(ts time.Time, word string) bool {
	return word == duration.HumanDuration(p.from.Sub(ts)) || word == duration.HumanDuration(p.to.Sub(ts))
}

// rank prints the row with each time moved so that its age tells its rank: the latest of them is firstRank old.
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

// isConstant says whether the cell with number i is what it is though all times are others: a duration between two of them,
// or no duration at all.
func (p *printer) isConstant(i int) (bool, error) {
	if p.shiftedBack == nil {
		var err error
		if p.shiftedBack, err = p.print(func(t time.Time) time.Time { return t.Add(shiftBack) }); err != nil {
			return false, err
		}
	}
	return cellAt(p.shiftedBack, i) == p.cells[i], nil
}

// print is the same row's cells, were all the object's times others; none, where that is too much to ask.
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

// cellAt is a row's cell, or nil where it has not so many.
func cellAt(cells []any, i int) any {
	if i < len(cells) {
		return cells[i]
	}
	return nil
}

// times are the object's.
func (p *printer) times() []timestamp {
	if p.timestamps == nil {
		p.timestamps = timestampsOf(p.obj)
	}
	return p.timestamps
}
