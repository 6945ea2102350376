"""Words that records, filler and demonstrations are made of; all of our own writing.

The order of `KEYS[:64]`, `VALUES[:64]` and `FILLER[:64]` is a contract: the vocabulary of the bundled
models is laid out from these three heads. Append to the lists, never reorder or remove.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The first 64 are animals.
KEYS: tuple[str, ...] = _words(
    """
    cat dog horse bear wolf fox lion tiger mouse rabbit sheep goat cow pig duck goose
    eagle hawk owl crow bull snake frog turtle fish shark whale dolphin seal crab spider bee
    ant moth beetle worm snail deer elk moose bison camel donkey mule zebra monkey ape elephant
    rat bat chicken beaver squirrel puppy lamb lizard parrot pigeon turkey salmon trout tuna lobster octopus

    doctor nurse lawyer farmer teacher student soldier sailor pilot driver baker butcher painter singer dancer
    writer poet actor author editor judge priest monk king queen prince princess knight duke lord
    mayor senator governor president minister captain colonel sergeant officer detective guard thief spy
    pirate hunter miner carpenter plumber mechanic engineer scientist chemist dentist surgeon patient
    tourist guest host servant clerk cashier manager director boss worker tailor chef waiter barber
    coach player referee runner swimmer boxer champion rival mother father sister brother daughter son
    uncle aunt cousin nephew niece grandmother grandfather husband wife baby child girl boy

    river mountain valley forest desert island ocean lake beach cliff canyon volcano glacier
    jungle swamp meadow prairie hill cave waterfall reef harbor bay peninsula continent
    village city town castle palace tower temple church chapel monastery cathedral mosque museum
    library school college university hospital clinic pharmacy prison court factory warehouse farm barn
    stable mill mine quarry airport station hotel restaurant bakery theater cinema
    stadium arena gym zoo circus cemetery tomb embassy

    planet moon star comet galaxy satellite rocket shuttle telescope airplane helicopter glider balloon
    train truck bus taxi tractor ambulance bicycle motorcycle scooter boat ship ferry canoe yacht
    submarine raft tank cannon missile bomb rifle pistol sword dagger spear shield
    arrow helmet armor trumpet violin piano guitar drum flute organ harp cello

    computer keyboard monitor printer scanner laptop tablet server router modem camera phone radio
    television robot engine motor turbine battery generator reactor laser magnet sensor antenna
    microscope thermometer compass map globe calendar journal diary novel magazine newspaper
    dictionary textbook passport ticket license

    tree bush flower rose lily tulip daisy orchid lotus oak pine maple birch cedar elm ivy
    fern moss mushroom cactus bamboo vine weed seed root leaf branch stem bark
    virus germ fungus cell gene protein enzyme hormone vitamin tumor
    brain heart liver kidney lung stomach muscle nerve skin bone skull spine
    shoulder elbow wrist thumb finger knee ankle toe ear eye nose mouth tongue tooth chin neck
    swan otter badger hamster
    arm leg hand foot palm hip chest throat cheek lip beard tail wing feather horn shell
    neighbor visitor stranger tenant landlord investor banker broker merchant trader dealer buyer seller owner
    scholar historian philosopher economist analyst programmer designer architect builder
    """
)

# The first 64 are colours, materials and small objects.
VALUES: tuple[str, ...] = _words(
    """
    red blue green yellow purple orange brown black white pink violet gold silver copper iron steel
    bronze tin zinc glass wood stone marble clay sand brick paper silk cotton wool linen leather
    velvet rubber plastic wax ivory pearl diamond lead amber coral crystal jade granite concrete coal oil
    ink paint salt sugar honey butter cheese bread needle button ring coin key bell candle rope

    apple banana cherry grape lemon lime peach pear plum melon mango berry olive tomato potato carrot
    onion garlic pepper cabbage lettuce spinach celery pumpkin bean pea corn rice wheat barley oats
    flour dough cake pie cookie biscuit candy chocolate caramel vanilla cinnamon ginger mint
    basil mustard vinegar sauce soup stew salad sandwich pizza pasta noodle bacon ham sausage
    steak beef pork egg milk cream yogurt juice coffee tea wine beer whiskey vodka soda water

    hammer saw drill wrench nail screw bolt nut wire cable chain hook lever pulley spring
    gear wheel axle pump pipe hose valve filter switch plug socket fuse lamp bulb torch
    ladder shovel rake axe knife fork spoon plate bowl cup mug jar bottle kettle
    oven stove grill toaster blender freezer bucket broom mop sponge soap towel brush comb mirror
    razor perfume lotion powder pill syrup bandage cork

    hat cap scarf glove coat jacket shirt vest sweater dress skirt belt sock shoe boot
    sandal slipper pocket zipper collar sleeve crown necklace bracelet wallet purse
    backpack suitcase basket box crate barrel envelope stamp pen pencil eraser ruler scissors
    glue tape pin clip folder notebook poster banner flag badge medal trophy ribbon

    ball dice doll puzzle kite puppet mask whistle racket paddle net goal
    circle square triangle cube sphere cone cylinder pyramid spiral arc line
    cross knot dot stripe spot layer column block slice bundle

    oxygen hydrogen nitrogen carbon helium neon sulfur sodium calcium magnesium aluminum nickel
    titanium uranium mercury platinum cobalt chlorine iodine lithium

    music song melody rhythm dance poem story joke riddle letter word sentence chapter page
    number symbol signal code cipher password message secret rumor gift prize award reward
    loan debt tax profit salary budget price market contract treaty law rule vote
    idea dream memory hope fear anger joy pride shame grief mercy courage wisdom luck
    fire smoke ash flame spark lightning thunder shadow echo

    alpha beta gamma delta sigma omega north south east west
    summer winter autumn morning evening midnight
    ruby dust mud gas alcohol acid fuel poison medicine vaccine
    circuit lens tube rod pole beam frame panel tile rug quilt blanket pillow
    essay report memo note sketch drawing portrait statue sculpture photograph video movie film
    copy draft proof theorem equation formula theory method plan project
    """
)

# Neutral, function-like words; exactly the 64 that the bundled models know.
FILLER: tuple[str, ...] = _words(
    """
    the of and to in that it with as for on be at by this had
    not but from or have an they which were all there would their we been has
    when who will no more if out so up what its about than into them can
    only other some could these may then do any like our over such also most where
    """
)

# Neutral prose: no names, no numbers, no word of KEYS or VALUES.
PROSE = """
The rain began before dawn and did not stop until late in the afternoon. It fell evenly over the roofs and
ran along the gutters, and the pavement shone between the houses. A few people walked quickly past the
closed shops, holding their clothes shut and keeping close to the walls. Nobody seemed to be in a great
hurry, yet nobody wanted to stand still. When the wind turned, the rain came down at an angle, and even the
doorways gave little shelter. Later it grew lighter, the clouds thinned out, and a pale sun appeared for a
short while behind them.

The street is wide at its lower end and becomes narrow as it climbs. On the left there is a low fence, then
a gate that is never locked, then a long wall with small windows high above the ground. On the right the
houses stand a little back, so that there is room for benches and a strip of grass. Somebody has swept the
steps. The corner is quiet in the early hours; after that the traffic returns and fills the whole crossing
with noise. At the far end the road bends, and from there one can see the bridge and the slope beyond it.

Inside, the furniture is plain and has been used for a long time. A heavy desk stands under the window, and
beside it is a chair whose seat has been repaired more than once. The shelves reach almost to the ceiling.
They are full, but not crowded, and everything on them has its own place. The sofa faces the door. Its
cushions are soft and slightly faded on the side where the sun comes in. There is a thick carpet on the
floor, and it makes the room quiet. The curtains are usually open during the day and closed when it gets
dark.

In the colder months the weather is dull for weeks. Fog comes up from the low ground and settles between the
buildings, and for days the sky is hardly visible. Then a clear period follows. The air becomes dry and
sharp, frost lies on the ground until noon, and sounds carry farther than usual. People open their windows
briefly and close them again. They talk about how long it will last. Usually it lasts less long than they
expect, because the wind changes and brings the clouds back.

The room upstairs is smaller and gets less sun. It has a narrow bed, a wardrobe, and a stool that also
serves as a table. Whoever sleeps there hears the roof when it rains. The drawers stick in damp weather and
have to be pulled slowly. Someone once planned to move the wardrobe to the opposite wall, but it proved too
wide for that, and so it remained where it was. Apart from this nothing has been changed, and there is no
reason to change anything now.

Toward the end of the day the street becomes calm again. The shutters are lowered, the benches empty out,
and the last of the warmth leaves the walls. A window is still open somewhere, and one can hear how dishes
are put away and chairs are moved. The clouds have drifted off. It will be dry tomorrow, most people think,
and perhaps a little warmer, although the forecast was careful and promised nothing. Those who have to leave
early look at the sky once more before they go in.

After a storm the lane behind the houses is always covered with twigs and loose gravel. It takes a while
before somebody clears it, since the lane belongs to everyone and therefore to nobody. The puddles stand in
shallow places and slowly drains away. By the following day the ground is firm enough to walk on, and after
another day there is hardly a trace of what happened. The fence leans a little more than before, and the
gate does not quite close, but both will hold for some time.

A long corridor connects the front rooms with those at the back. It is lit from above, and its walls are
bare except for a row of pegs. The floor creaks near the stairs, always at the same place. In the waiting
area there are several chairs along the wall and a low table in the middle. The chairs do not match, though
this is noticed only by those who have to wait for long. The heating works well there, sometimes too well,
and so the door is often left ajar. Now and then a draught goes through the whole building and closes it.
"""
