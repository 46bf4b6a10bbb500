package encoder

import (
	"context"
	"encoding/json"
	"regexp"
	"strings"
	"time"

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
// and is no age at all if it stays as it is when all times are moved.

// clockwise is a duration as duration.HumanDuration writes it.
var clockwise = regexp.MustCompile(`^(([0-9]+[smhdy]){1,2}|<invalid>)$`)

// between are what parts the words of a cell.
const between = " (),"

// durations are where in a cell words are that look like durations.
func durations(cell string) (at [][2]int) {
	for begin := 0; begin < len(cell); {
		n := strings.IndexAny(cell[begin:], between)
		if n < 0 {
			n = len(cell) - begin
		}
		if clockwise.MatchString(cell[begin : begin+n]) {
			at = append(at, [2]int{begin, begin + n})
		}
		begin += n + 1
	}
	return at
}

// cellsHead is how a row's JSON begins.
const cellsHead = `{"cells":[`

// printed is an object's row as JSON, and what of it follows the clock. The row was made since from; it is not what it
// was after this.
func printed(ctx context.Context, convertor rest.TableConvertor, obj runtime.Object,
	row *metav1.TableRow, from time.Time) (data []byte, clock *registryv1.Clock, err error) {
	p := &printer{ctx: ctx, convertor: convertor, obj: obj, from: from, to: time.Now(), cells: row.Cells}
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
	clock = &registryv1.Clock{AgesOnly: true}
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
				clock.Ages = append(clock.Ages, ageIn(text, words[0], offsets[i], when))
				continue
			}
		}
		stays, err := p.stays(i)
		if err != nil {
			return nil, nil, err
		}
		clock.AgesOnly = clock.AgesOnly && stays
	}
	return data, clock, nil
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
	// all are the object's times, once they were asked for.
	all []moment
}

const (
	// longAgo is by how much times are moved so that no duration stays what it was.
	longAgo = -1000 * 24 * time.Hour
	// lately is how long ago a time is moved to so that its age is told by the second.
	lately, latelyTold = 60500 * time.Millisecond, "60s"
	// mostTried is how many times of an object are tried for one cell.
	mostTried = 4
)

// ageOf is when that was whose age a word of the cell with number i is.
func (p *printer) ageOf(i int, cell string, word [2]int) (when time.Time, found bool, err error) {
	tried := map[time.Time]bool{}
	for _, m := range p.times() {
		if tried[m.at] || len(tried) == mostTried || !p.tells(m.at, cell[word[0]:word[1]]) {
			continue
		}
		tried[m.at] = true
		is, err := p.cell(i, time.Now().Add(-lately).Sub(m.at))
		if err != nil {
			return when, false, err
		}
		if is == cell[:word[0]]+latelyTold+cell[word[1]:] {
			return m.at, true, nil
		}
	}
	return when, false, nil
}

// tells says whether a word is how long ago a time was when the row was made.
func (p *printer) tells(at time.Time, word string) bool {
	return word == duration.HumanDuration(p.from.Sub(at)) || word == duration.HumanDuration(p.to.Sub(at))
}

// stays says whether the cell with number i is what it is though all times are others: a duration between two of them,
// or no duration at all.
func (p *printer) stays(i int) (bool, error) {
	is, err := p.cell(i, longAgo)
	return is == p.cells[i], err
}

// cell is the cell with number i of the same row, were all the object's times moved by so much.
func (p *printer) cell(i int, by time.Duration) (any, error) {
	for _, m := range p.times() {
		m.set(m.at.Add(by))
		defer m.set(m.at)
	}
	t, err := p.convertor.ConvertToTable(p.ctx, p.obj, &metav1.TableOptions{NoHeaders: true})
	if err != nil || len(t.Rows) != 1 || i >= len(t.Rows[0].Cells) {
		return nil, err
	}
	return t.Rows[0].Cells[i], nil
}

// times are the object's.
func (p *printer) times() []moment {
	if p.all == nil {
		p.all = momentsOf(p.obj)
	}
	return p.all
}
