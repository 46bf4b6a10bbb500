package encoder

import (
	"context"
	"encoding/json"
	"regexp"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apiserver/pkg/registry/rest"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// A row tells ages, so it is not what it was a second ago though its object is. Nearly every row would be, if it were
// not for one cell: how long ago the object was created. Whoever keeps rows is told where that is, and whether another
// cell follows the clock too, in which case the row is not to be kept.

// clockwise is a duration as duration.HumanDuration writes it, as a cell or as a word of one. A cell that looks so and
// is none does no harm: its row is not kept.
var clockwise = regexp.MustCompile(`(^|[ (,])(([0-9]+[smhdy]){1,2}|<invalid>)($|[ ),])`)

// cellsHead is how a row's JSON begins.
const cellsHead = `{"cells":[`

// printed is an object's row as JSON, and what of it follows the clock. The row was made since from; it and obj are not
// what they were after this.
func printed(ctx context.Context, convertor rest.TableConvertor, obj runtime.Object,
	row *metav1.TableRow, from time.Time) (data []byte, clock *registryv1.Clock, err error) {
	to := time.Now()
	cells := row.Cells
	row.Cells = make([]any, len(cells))
	offsets := make([]int, len(cells)+1)
	offsets[0] = len(cellsHead)
	for i, cell := range cells {
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
	var without []any // the same row, were the object not created at any time
	var created metav1.Time
	for i, cell := range cells {
		text, ok := cell.(string)
		if !ok || !clockwise.MatchString(text) {
			continue
		}
		if without == nil {
			if created, without, err = uncreated(ctx, convertor, obj); err != nil {
				return nil, nil, err
			}
		}
		age := i < len(without) && without[i] != cell && created.Nanosecond() == 0 &&
			(text == duration.HumanDuration(from.Sub(created.Time)) ||
				text == duration.HumanDuration(to.Sub(created.Time)))
		if !age {
			clock.AgesOnly = false
			continue
		}
		clock.Ages = append(clock.Ages, &registryv1.Age{
			Offset: int32(offsets[i]),
			Length: int32(offsets[i+1] - offsets[i] - len(",")),
			Since:  created.Unix(),
		})
	}
	return data, clock, nil
}

// uncreated is when an object was created, and its row's cells without that.
func uncreated(ctx context.Context, convertor rest.TableConvertor, obj runtime.Object) (metav1.Time, []any, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return metav1.Time{}, nil, err
	}
	created := m.GetCreationTimestamp()
	m.SetCreationTimestamp(metav1.Time{})
	t, err := convertor.ConvertToTable(ctx, obj, &metav1.TableOptions{NoHeaders: true})
	if err != nil {
		return created, nil, err
	}
	if len(t.Rows) != 1 {
		return created, []any{}, nil
	}
	return created, t.Rows[0].Cells, nil
}
